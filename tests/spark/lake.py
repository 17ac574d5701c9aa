"""Small words for the tests of Spark: read, write, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Database
from tests.stress.sessions import value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class Bench:
    """A database and a session, and what the tests do with them."""

    def __init__(self, spark: SparkSession, db: Database) -> None:
        self.spark = spark
        self.db = db
        self.c = db.connect()

    def stream(self, name: str = "orders", **options: Any) -> None:
        self.c.execute("select postbus.create_stream(%s, %s)", [name, Jsonb(options)])

    def fill(self, count: int, to: str = "orders", first: int = 1) -> None:
        self.c.execute(
            "select postbus.publish_batch(%s, array(select format('{\"n\": %%s}', i) from generate_series("
            "%s::int, %s::int) i order by i), keys => array(select 'k' || i %% 10 from generate_series("
            "%s::int, %s::int) i order by i))",
            [to, first, first + count - 1, first, first + count - 1],
        )

    def options(self, **options: Any) -> dict[str, str]:
        """Options for the stream orders of this database, unless told otherwise."""
        named = {"dsn": self.db.dsn, **options}
        if not {"subscribe", "subscribePattern"} & set(named):
            named["subscribe"] = "orders"
        return {k: str(v) for k, v in named.items() if v is not None}

    def batch(self, **options: Any) -> DataFrame:
        return self.spark.read.format("postbus").options(**self.options(**options)).load()

    def numbers(self, **options: Any) -> list[int]:
        """The n of every payload of a batch, sorted."""
        rows = self.batch(columns="payload", **options).collect()
        return sorted(int(r.payload[6:-1]) for r in rows)

    def reading(self, **options: Any) -> DataFrame:
        return self.spark.readStream.format("postbus").options(**self.options(**options)).load()

    def query(
        self, df: DataFrame, out: Path, *, now: bool = True, every: str = "0 seconds"
    ) -> StreamingQuery:
        """Start a query into Parquet; with now, it ends when everything is read."""
        writer = df.writeStream.format("parquet").option("checkpointLocation", str(out / "checkpoint"))
        writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime=every)
        return writer.start(str(out / "data"))

    def drain(self, out: Path, **options: Any) -> list[int]:
        """Run a query until everything is read; how many rows each of its batches had."""
        query = self.query(self.reading(**options), out)
        query.awaitTermination()
        return [p.numInputRows for p in query.recentProgress if p.numInputRows]

    def written(self, out: Path) -> list[int]:
        """The numbers that a query has written, as Spark reads them."""
        if not (out / "data" / "_spark_metadata" / "0").exists():
            return []
        rows = self.spark.read.schema("payload string").parquet(str(out / "data")).collect()
        return sorted(int(r.payload[6:-1]) for r in rows)

    def row(self, df: DataFrame) -> list[Any]:
        """The values of the only row."""
        (row,) = df.collect()
        return list(row)

    def position(self, at: str = "latest", of: str = "orders") -> str:
        return str(value(self.c, "select postbus.position(%s, %s, 'test')", of, at))


@contextmanager
def fails(*saying: str) -> Iterator[None]:
    """Spark raises, and the message has these words."""
    with pytest.raises(Exception) as e:  # noqa: PT011 - Spark has a class for every occasion
        yield
    for words in saying:
        assert words in str(e.value), str(e.value)


@contextmanager
def running(query: StreamingQuery) -> Iterator[StreamingQuery]:
    try:
        yield query
    finally:
        query.stop()


def wait_for(query: StreamingQuery, true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        error = query.exception()
        assert error is None, error
        assert time.monotonic() < end, f"not in {seconds} s: {query.lastProgress}"
        time.sleep(0.05)
