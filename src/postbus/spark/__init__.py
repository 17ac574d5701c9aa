"""Spark: streams as a source, through PySpark.

Example:
    >>> from postbus.spark import session
    >>> spark = session()  # doctest: +SKIP
    >>> spark.read.format("postbus").option("dsn", dsn).option("subscribe", "orders").load()  # doctest: +SKIP
"""

from postbus.spark._java import java_home
from postbus.spark._lake_read import read_lake
from postbus.spark._session import session

__all__ = ["java_home", "read_lake", "session"]
