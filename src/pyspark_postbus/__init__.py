"""How Spark finds the data source ``postbus``: it looks into every top-level module named ``pyspark_*``."""

from postbus.spark._source import PostbusSource as DefaultSource

__all__ = ["DefaultSource"]
