"""Lake tables, without Spark."""
