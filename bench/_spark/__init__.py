"""Parts of the benchmark of Spark."""
