"""The Spark source, on a real Spark and a real PostgreSQL."""
