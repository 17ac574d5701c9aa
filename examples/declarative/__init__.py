"""A declarative pipeline of Spark on a stream of Postbus."""
