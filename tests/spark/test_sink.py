"""The sink: batches and streams into streams and queues, once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.spark.lake import Bench, fails
from tests.stress.sessions import value
from tests.windows.reading import position, window


def into(bench: Bench, df: Any, **options: Any) -> None:
    df.write.format("postbus").options(dsn=bench.db.dsn, **options).mode("append").save()


def there(bench: Bench, of: str = "out") -> list[str]:
    return window(bench.c, position(bench.c, "earliest", of=of), position(bench.c, of=of), of=of)


def test_a_batch_into_a_stream(bench: Bench) -> None:
    bench.stream("out", lanes=2)
    df = bench.spark.range(0, 7000, numPartitions=3).selectExpr(
        "cast(id as string) as payload", "if(id % 2 = 0, 'even', null) as type", "concat('k', id % 3) as key",
        "map('n', cast(id as string)) as headers",
    )  # fmt: skip
    into(bench, df, stream="out")
    assert there(bench) == [str(i) for i in range(7000)], "in the order of the partitions"
    row = bench.c.execute("select type, key, headers from postbus.log where payload = '3'").fetchone()
    assert row == ("default", "k0", {"n": "3"})
    assert value(bench.c, "select count(*) from postbus.staged") == 0
    into(bench, df.limit(1), stream="out")
    assert len(there(bench)) == 7001


def test_bytes_and_texts(bench: Bench) -> None:
    bench.stream("out")
    rows = [("a", None, '{"h": 1}'), (None, bytearray(b"\0\1"), None), ("b", None, None)]
    df = bench.spark.createDataFrame(rows, "payload string, blob binary, headers string").coalesce(1)
    into(bench, df, stream="out")
    got = bench.c.execute("select payload, blob, headers from postbus.log order by id").fetchall()
    assert got == [("a", None, {"h": 1}), (None, b"\0\1", None), ("b", None, None)]
    into(bench, bench.spark.createDataFrame([(bytearray(b"x"),)], "payload binary"), stream="out")
    assert value(bench.c, "select blob from postbus.log order by id desc limit 1") == b"x"


def test_a_batch_into_a_queue(bench: Bench) -> None:
    bench.c.execute("select postbus.create_queue('jobs')")
    df = bench.spark.createDataFrame([("a",), ("b",)], "payload string")
    into(bench, df, queue="jobs", priority=3, delay="0 seconds", ttl="1 hour")
    got = bench.c.execute("select payload from postbus.receive('jobs', 10) order by id").fetchall()
    assert got == [("a",), ("b",)]


def run(bench: Bench, checkpoint: Path) -> None:
    df = bench.reading(startingOffsets="earliest", maxEventsPerTrigger=40).select("key", "payload")
    query = (
        df.writeStream.format("postbus")
        .options(dsn=bench.db.dsn, stream="out", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_stream_into_a_stream_and_a_batch_that_comes_again(bench: Bench, tmp_path: Path) -> None:
    bench.stream(lanes=3)
    bench.stream("out")
    bench.fill(100)
    run(bench, tmp_path)
    expected = [f'{{"n": {i}}}' for i in range(1, 101)]
    assert sorted(there(bench)) == sorted(expected)
    # As if the driver had died between the commit and its log: Spark runs the last batch again.
    commits = tmp_path / "commits"
    (last,) = (p for p in commits.glob("[0-9]*") if p.name == "2")
    last.unlink()
    (commits / ".2.crc").unlink(missing_ok=True)
    run(bench, tmp_path)
    assert sorted(there(bench)) == sorted(expected)
    bench.fill(10, first=101)
    run(bench, tmp_path)
    assert len(there(bench)) == 110
    # Another checkpoint is another query.
    shutil.rmtree(tmp_path)
    run(bench, tmp_path)
    assert len(there(bench)) == 220


def test_nothing_half_published(bench: Bench) -> None:
    bench.stream("out")
    df = bench.spark.createDataFrame([("a",), (None,)], "payload string").repartition(2)
    with fails("a row has no payload"):
        into(bench, df, stream="out")
    both = bench.spark.sql("select binary('a') as payload, binary('b') as blob")
    with fails("a row has both payload and blob"):
        into(bench, both, stream="out")
    with fails("a row cannot be stored", "0x00"):
        into(bench, bench.spark.sql("select 'a' as payload, string(unhex('6100')) as key"), stream="out")
    with fails("headers are not JSON"):
        into(bench, bench.spark.sql("select 'a' as payload, '{' as headers"), stream="out")
    assert there(bench) == []


def test_bad_input(bench: Bench) -> None:
    bench.stream("out")
    good = bench.spark.sql("select 'a' as payload")
    cases: list[tuple[Any, dict[str, str], tuple[str, ...]]] = [
        (good, {}, ("one stream or one queue", "option stream or option queue")),
        (good, {"stream": "out", "queue": "q"}, ("one stream or one queue",)),
        (good, {"stream": "nowhere"}, ("option stream", "'nowhere' does not exist", "create_stream")),
        (good, {"queue": "nowhere"}, ("option queue", "'nowhere' does not exist", "create_queue")),
        (good, {"stream": "out", "priority": "1"}, ("for queues only",)),
        (good, {"stream": "out", "colour": "red"}, ("unknown option colour",)),
        (good, {"queue": "out", "priority": "x"}, ("option priority must be 0 to 9",)),
        (good.selectExpr("payload", "1 as lane"), {"stream": "out"}, ("no column 'lane'", "select()")),
        (good.selectExpr("payload as key"), {"stream": "out"}, ("needs a column payload",)),
        (good.selectExpr("1 as payload"), {"stream": "out"}, ("column 'payload' is int",)),
    ]
    for df, options, saying in cases:
        with fails(*saying):
            into(bench, df, **options)
    with fails("cannot be overwritten"):
        good.write.format("postbus").options(dsn=bench.db.dsn, stream="out").mode("overwrite").save()
    assert there(bench) == []
