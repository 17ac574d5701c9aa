"""The lake sink and read_lake: exactly once, columns that grow, the same rows for every reader."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postbus.errors import PostbusError
from postbus.lake import LakeFile
from postbus.spark import read_lake
from tests.lake.conftest import Lake, rows
from tests.spark.lake import Bench, fails

FORMATS = pytest.mark.parametrize("form", ["delta", "iceberg"])
ODD = ["a/b=c", "50% é [x]{y}*?", "a%2Fb", "'\"\\:#^", " ", "plain"]


class Target:
    """A lake and the bench that writes to it."""

    def __init__(self, bench: Bench, folder: Path, form: str = "delta") -> None:
        self.bench = bench
        self.lake = Lake(folder, form, bench.db.dsn)
        self.options = {"lake": str(folder), "table": "events", "lakeFormat": form, "dsn": bench.db.dsn}

    def save(self, df: Any, **options: str) -> None:
        df.write.format("postbus").options(**self.options, **options).mode("append").save()

    def drain(self, checkpoint: Path, **options: str) -> None:
        df = self.bench.reading(startingOffsets="earliest", maxEventsPerTrigger=40, minPartitions=2)
        query = (
            df.writeStream.format("postbus")
            .options(**self.options, **options)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def read(self, version: int | None = None) -> Any:
        lake = self.lake
        return read_lake(
            self.bench.spark, str(lake.folder), "events", format=lake.format, dsn=lake.dsn, version=version
        )

    def everywhere(self, *columns: str) -> list[Any]:
        """The rows, which all readers agree on."""
        mine = rows(self.lake.open().read(), *columns)
        found = rows(self.read().toArrow(), *columns)
        assert found == mine
        assert rows(self.lake.elsewhere().select(self.lake.open().schema().names), *columns) == mine
        return mine


def again(checkpoint: Path) -> None:
    """As if the driver had died between the commit and its log: Spark runs the last batch again."""
    commits = checkpoint / "commits"
    last = max(int(p.name) for p in commits.glob("[0-9]*"))
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)


@pytest.mark.timeout(300)
@FORMATS
def test_a_stream_once_and_with_columns_that_grow(bench: Bench, tmp_path: Path, form: str) -> None:
    target = Target(bench, tmp_path / "lake", form)
    options = {"partitionBy": "stream,date", "expand": "payload"}
    bench.stream(lanes=3)
    bench.fill(100)
    target.drain(tmp_path / "checkpoint", **options)
    assert target.everywhere("n") == list(range(1, 101))
    table = target.lake.open()
    assert table.partition_by == ("stream", "date")
    version = table.version()
    again(tmp_path / "checkpoint")
    target.drain(tmp_path / "checkpoint", **options)
    assert target.lake.open().version() == version, "the batch was recognised"
    for payload in ('{"n": 101, "colour": "red"}', '{"n": "many", "colour": 7}', "no json"):
        bench.c.execute("select postbus.publish('orders', %s::text)", [payload])
    target.drain(tmp_path / "checkpoint", **options)
    last = [r for r in target.everywhere("id", "n", "colour", "_rescued", "payload") if r[0] > 100]
    assert last == [
        (101, 101, "red", None, '{"n": 101, "colour": "red"}'),
        (102, None, None, '{"n":"many","colour":7}', '{"n": "many", "colour": 7}'),
        (103, None, None, None, "no json"),
    ]
    truth = bench.c.execute("select id, payload, (at at time zone 'UTC')::date from postbus.log").fetchall()
    assert target.everywhere("id", "payload", "date") == sorted(truth)
    assert target.read(version).count() == 100, "the version before is still there"


@FORMATS
def test_a_batch_with_odd_partitions(bench: Bench, tmp_path: Path, form: str) -> None:
    target = Target(bench, tmp_path / "a lake [1]{x}", form)
    at = datetime(2026, 5, 1, 22, 30, 0, 123456, tzinfo=UTC)
    events = [(s, n, at, bytearray(b"\0\xff") if n else None) for n, s in enumerate([*ODD, None])]
    df = bench.spark.createDataFrame(events, "stream string, id bigint, at timestamp, blob binary")
    zone = "spark.sql.session.timeZone"
    bench.spark.conf.set(zone, "Asia/Tokyo")  # where it is the next day already
    try:
        target.save(df, partitionBy="stream,date")
    finally:
        bench.spark.conf.set(zone, "UTC")
    found = {r[0]: r for r in target.everywhere("id", "stream", "at", "date", "blob")}
    assert len(found) == len(events)
    for stream, number, moment, blob in events:
        assert found[number][1:] == (stream, moment, date(2026, 5, 1), blob and bytes(blob))
    df = target.read()
    assert [r.id for r in df.where(df.stream == ODD[1]).collect()] == [1]
    assert [r.id for r in df.where(df.stream.isNull()).collect()] == [len(ODD)]
    assert df.schema["at"].dataType.typeName() == "timestamp"
    assert df.schema["date"].dataType.typeName() == "date"
    target.save(bench.spark.sql("select 's' as stream, 1L as id, current_timestamp() as at where false"),
                partitionBy="stream,date")  # fmt: skip
    assert target.read().count() == len(events)


def test_tasks_of_one_batch_disagree(bench: Bench, tmp_path: Path) -> None:
    target = Target(bench, tmp_path)
    # The first partition decides; in the second the same field is a text.
    df = bench.spark.range(0, 4, numPartitions=2).selectExpr(
        "id", "if(id < 2, concat('{\"x\": ', id, '}'), concat('{\"x\": \"', id, '\"}')) as payload"
    )
    target.save(df, expand="payload")
    got = target.everywhere("id", "x", "_rescued")
    assert got == [(0, 0, None), (1, 1, None), (2, None, '{"x":"2"}'), (3, None, '{"x":"3"}')]


def test_reading_after_merges_and_at_versions(bench: Bench, tmp_path: Path) -> None:
    import pyarrow as pa

    target = Target(bench, tmp_path)
    table = target.lake.open()
    table.create(pa.schema({"id": pa.int64(), "name": pa.string()}), writer="mirror")
    assert target.read().collect() == [], "an empty table"
    for batch, (number, name) in enumerate([(1, "a"), (2, "b"), (1, "c")]):
        table.merge(pa.table({"_op": ["upsert"], "id": [number], "name": [name]}), ["id"], "m", batch)
    table.compact()
    assert target.everywhere() == [(1, "c"), (2, "b")]
    assert sorted(map(tuple, target.read(2).collect())) == [(1, "a"), (2, "b")]
    with fails("is written by 'mirror', not by 'spark'"):
        target.save(bench.spark.sql("select 1L as id, 'x' as name"))
    with fails("no version 99"):
        target.read(99)
    with fails("there is no delta table nothing"):
        read_lake(bench.spark, str(tmp_path), "nothing")


def test_a_task_that_fails_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    target = Target(bench, tmp_path)
    df = bench.spark.range(0, 1000, numPartitions=2)
    target.save(df)
    broken = df.selectExpr("if(id = 900, cast(raise_error('boom') as bigint), id) as id")
    with fails("boom"):
        target.save(broken)
    assert len(target.everywhere("id")) == 1000
    files = len(list(tmp_path.rglob("*.parquet")))
    assert files <= 3, "the task that failed took its own away; the other's waits for vacuum"
    assert target.lake.open().vacuum(timedelta(0)).files == files - 2


def test_bad_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is said before the table is created."""
    from pyspark.sql import types as t

    from postbus.spark import _lake_sink

    monkeypatch.delenv("POSTBUS_DSN", raising=False)
    good = t.StructType().add("id", "long").add("payload", "string").add("at", "timestamp")
    here = {"lake": str(tmp_path), "table": "events"}
    cases: list[tuple[t.StructType, dict[str, str], str]] = [
        (good, {"lake": str(tmp_path)}, "option table is missing"),
        (good, {"lake": str(tmp_path), "table": "a/b"}, "'a/b' is no name for a lake table"),
        (good, {**here, "colour": "red"}, r"unknown option colour of the lake sink\n.*lakeFormat"),
        (good, {**here, "stream": "s"}, "unknown option stream of the lake sink"),
        (good, {**here, "lakeFormat": "hudi"}, "must be delta or iceberg, not 'hudi'"),
        (good, {**here, "lakeFormat": "iceberg"}, "option dsn is missing"),
        (good, {**here, "partitionBy": "hour"}, r"names 'hour', which .*\nColumns are id, payload, at"),
        (good, {**here, "partitionBy": ""}, "option partitionBy is empty"),
        (good, {**here, "maxColumns": "9"}, "no meaning without expand"),
        (good, {**here, "expand": "payload", "maxColumns": "x"}, "maxColumns must be a whole number"),
        (good, {**here, "expand": "id"}, "expand names 'id', which is no column of texts"),
        (t.StructType().add("id", "long"), {**here, "partitionBy": "date"}, "neither date nor at"),
        (t.StructType().add("n", t.NullType()), here, "column 'n' is of type null"),
        (t.StructType().add("i", t.DayTimeIntervalType()), here, "column 'i' is of type duration"),
    ]
    for schema, options, saying in cases:
        with pytest.raises(PostbusError, match=saying):
            _lake_sink.BatchWriter(_lake_sink.parse(options), schema)
    assert not any(tmp_path.iterdir()), "nothing was created"


def test_files_that_the_driver_does_not_find(tmp_path: Path) -> None:
    """As on a cluster whose machines have each a folder of that name."""
    from pyspark.sql import types as t

    from postbus.spark import _lake_sink

    target = _lake_sink.parse({"lake": str(tmp_path), "table": "events"})
    writer = _lake_sink.BatchWriter(target, t.StructType().add("id", "long"))
    written = _lake_sink.Written([LakeFile("part-elsewhere.parquet", 1, 1)], None, 0)
    with pytest.raises(PostbusError, match=r"(?s)part-elsewhere.*does not find it.*same for all machines"):
        writer.commit([written])
    assert Lake(tmp_path, "delta", None).open().files() == []


def test_bad_input(bench: Bench, tmp_path: Path) -> None:
    good = bench.spark.sql("select 1L as id, '{}' as payload, current_timestamp() as at")
    target = Target(bench, tmp_path)
    with fails("a lake table is not overwritten"):
        good.write.format("postbus").options(**target.options).mode("overwrite").save()
    target.save(good)
    with fails("column 'id' of lake table events is int64, not string", "cast it"):
        target.save(good.selectExpr("'x' as id"))
    with fails("is of format delta, not iceberg", "lakeFormat to delta"):
        Target(bench, tmp_path, "iceberg").save(good)
    assert json.loads(target.everywhere("payload")[0]) == {}
