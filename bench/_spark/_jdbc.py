"""Spark's own way to PostgreSQL: the JDBC driver, reader and writer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DRIVER = "org.postgresql.Driver"
DEBIAN = Path("/usr/share/java/postgresql.jar")
MISSING = (
    "There is no JDBC driver at {}, so nothing can be measured beside it. On Debian and Ubuntu:"
    " apt-get install libpostgresql-jdbc-java; elsewhere name the jar: --jdbc FILE."
)


def jar(given: Path | None) -> Path:
    """The driver: Debian's package, or what was named."""
    path = given or DEBIAN
    if not path.is_file():
        raise SystemExit(MISSING.format(path))
    return path


class Jdbc:
    """One database, through the driver."""

    def __init__(self, spark: SparkSession, dsn: str, fetch: int = 10_000, batch: int = 10_000) -> None:
        known = conninfo_to_dict(dsn)
        words = urlencode([(k, str(v)) for k, v in known.items() if k in ("user", "password")])
        where = f"{known['host']}:{known.get('port', 5432)}/{known['dbname']}"
        self.url = f"jdbc:postgresql://{where}?{words}"
        self.spark = spark
        self.fetch = fetch
        self.batch = batch

    def read(self, table: str, rows: int, tasks: int) -> DataFrame:
        """A table whose ids run from 1 to rows, divided by them."""
        reader = self.spark.read.format("jdbc").options(url=self.url, driver=DRIVER, dbtable=table)
        bounds = {"lowerBound": 1, "upperBound": rows + 1, "numPartitions": tasks}
        return reader.options(partitionColumn="id", fetchsize=self.fetch, **bounds).load()

    def write(self, df: DataFrame, table: str) -> None:
        """Append, each task in a transaction of its own."""
        writer = df.write.format("jdbc").options(url=f"{self.url}&reWriteBatchedInserts=true", driver=DRIVER)
        writer.options(dbtable=table, batchsize=self.batch).mode("append").save()
