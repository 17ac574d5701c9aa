"""Lake tables as DataFrames: the files of a commit, by Spark's own Parquet reader."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from postbus.errors import NotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_lake(
    spark: SparkSession,
    lake: str,
    name: str,
    *,
    format: str = "delta",
    dsn: str | None = None,
    version: int | None = None,
) -> DataFrame:
    """A lake table as it is now, or as it was.

    The files are chosen here and read by Spark: what is committed later is not seen. Partition columns come
    from the folders' names, and Spark skips folders that a filter on them rules out.

    Args:
        spark: the session.
        lake: the folder or URL of the lake.
        name: the table.
        format: ``delta`` or ``iceberg``.
        dsn: the database with the catalog, for Iceberg; ``POSTBUS_DSN`` by default.
        version: a version of Delta, a snapshot of Iceberg; by default the newest.

    Raises:
        NotFound: there is no such table, or no such version.

    Example:
        >>> read_lake(spark, "/data/lake", "events").groupBy("stream").count().show()  # doctest: +SKIP
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from postbus.lake import open_table

    table = open_table(lake, name, format=format, dsn=dsn or os.environ.get("POSTBUS_DSN"), version=version)
    if not table.exists():
        raise NotFound(
            f"there is no {format} table {name} in lake {lake}",
            hint="Check the names of the lake and the table, and the format.",
        )
    schema = from_arrow_schema(table.schema(), prefer_timestamp_ntz=True)
    root = table.place.uri
    files = [f"{root}/{file.path}" for file in table.files()]
    if not files:
        return spark.createDataFrame([], schema)
    # Names are taken as they are: a lake may lie in a folder with brackets in its name.
    reader = spark.read.schema(schema).option("basePath", root).option("__globPaths__", "false")
    return reader.parquet(*files).select(*(_quoted(field.name) for field in schema))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
