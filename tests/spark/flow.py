"""One walk through everything that touches Spark, which must end the same wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from tests.stress.sessions import Connection
from tests.windows.reading import position, window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = 1200
FORMATS = ("delta", "iceberg")
FILL = """
select postbus.publish_batch(%(stream)s,
  array(select format('{"n": %%s, "key": "k%%s"}', i, i %% 10)
    from generate_series(%(first)s, %(last)s, 3) i),
  keys => array(select 'k' || i %% 10 from generate_series(%(first)s, %(last)s, 3) i))
"""


def prepare(c: Connection) -> None:
    """Two streams with events, in three transactions each."""
    for name in ("orders", "refunds", "copy"):
        c.execute("select postbus.create_stream(%s, %s)", [name, Jsonb({"lanes": 3})])
    for name, count in (("orders", EVENTS), ("refunds", 60)):
        for part in range(3):
            c.execute(FILL, {"stream": name, "first": part, "last": count - 1})


def expected() -> dict[str, Any]:
    """What `walk` returns, by arithmetic."""
    orders = sorted(f'{{"n": {i}, "key": "k{i % 10}"}}' for i in range(EVENTS))
    refunds = sorted(f'{{"n": {i}, "key": "k{i % 10}"}}' for i in range(60))
    return {
        "batch": sorted([*orders, *refunds]),
        "by key": [[f"k{k}", sum(range(k, EVENTS, 10))] for k in range(10)],
        "batches": [300] * 4,
        "copy": orders,
        **dict.fromkeys(FORMATS, orders),
        "error": True,
    }


def walk(spark: SparkSession, c: Connection, dsn: str, out: Path) -> dict[str, Any]:
    """Batch, shuffle, stream into a stream, lake tables, and a mistake."""
    read = spark.read.format("postbus").option("dsn", dsn).option("minPartitions", "4")
    result: dict[str, Any] = {
        "batch": _payloads(read.option("subscribe", "orders,refunds").load()),
        "by key": [
            [r.key, r.total]
            for r in read.options(subscribe="orders", payloadSchema="n bigint, key string").load()
            .groupBy("data.key").agg({"data.n": "sum"}).toDF("key", "total").orderBy("key").collect()
        ],
    }  # fmt: skip
    rows = _drain(_stream(spark, dsn).select("payload"), out / "copy", dsn=dsn, stream="copy")
    result["batches"] = rows
    result["copy"] = sorted(window(c, position(c, "earliest", of="copy"), position(c, of="copy"), of="copy"))
    for name in FORMATS:
        result[name] = _through_the_lake(spark, dsn, out / name, name)
    try:
        _ = read.option("subscribe", "nowhere").load().columns  # Spark Connect looks now
    except Exception as exc:
        result["error"] = "there is no stream 'nowhere'" in str(exc)
    return result


def _through_the_lake(spark: SparkSession, dsn: str, out: Path, format: str) -> list[str]:
    from postbus.spark import read_lake

    lake = str(out / "lake")
    _drain(
        _stream(spark, dsn),
        out,
        dsn=dsn,
        lake=lake,
        table=format,
        lakeFormat=format,
        partitionBy="stream,date",
    )
    table = read_lake(spark, lake, format, format=format, dsn=dsn)
    return _payloads(table)


def _stream(spark: SparkSession, dsn: str) -> DataFrame:
    return (
        spark.readStream.format("postbus")
        .options(dsn=dsn, subscribe="orders", startingOffsets="earliest", maxEventsPerTrigger="300")
        .option("minPartitions", "2")
        .load()
    )


def _drain(df: DataFrame, out: Path, **options: str) -> list[int]:
    query = (
        df.writeStream.format("postbus")
        .options(**options)
        .option("checkpointLocation", str(out / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [p.numInputRows for p in query.recentProgress if p.numInputRows]


def _payloads(df: DataFrame) -> list[str]:
    return sorted(_texts(df.select("payload").collect()))


def _texts(rows: Iterable[Any]) -> list[str]:
    return [str(r.payload) for r in rows]
