"""Streams: windows one after another, across restarts, with every option."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.conftest import Database
from tests.spark.lake import Bench, fails, running, wait_for
from tests.stress.sessions import value

N = list(range(1, 101))


def offsets(out: Path) -> list[dict[str, Any]]:
    """What the query has written into its offset log, in order."""
    files = sorted((p for p in (out / "checkpoint" / "offsets").glob("[0-9]*")), key=lambda p: int(p.name))
    return [json.loads(p.read_text().splitlines()[2]) for p in files]


def test_a_query_reads_on_where_the_last_one_ended(bench: Bench, tmp_path: Path) -> None:
    bench.stream(lanes=3)
    bench.fill(50)
    assert bench.drain(tmp_path, startingOffsets="earliest") == [50]
    assert bench.drain(tmp_path) == []
    bench.fill(50, first=51)
    assert bench.drain(tmp_path) == [50]
    assert bench.written(tmp_path) == N


def test_a_new_query_begins_at_the_latest(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(5)
    with running(bench.query(bench.reading(), tmp_path, now=False)) as query:
        began = "select count(*) > 0 from postbus.held_tick where starts_with(holder, 'spark')"
        wait_for(query, lambda: bool(value(bench.c, began)))
        bench.fill(5, first=6)
        wait_for(query, lambda: bench.written(tmp_path) == [6, 7, 8, 9, 10])
        query.processAllAvailable()
    # Killed in its first batch it does the same again, though the latest is another one by now.
    first = tmp_path / "checkpoint" / "offsets" / "0"
    for folder in (first.parent, first.parents[1] / "commits", tmp_path / "data" / "_spark_metadata"):
        for file in folder.iterdir():
            if file != first:
                file.unlink()
    bench.fill(5, first=11)
    bench.drain(tmp_path)
    assert bench.written(tmp_path) == list(range(6, 16))


def test_starting_positions(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(10)
    middle = bench.position()
    at = value(bench.c, "select clock_timestamp()").isoformat()
    bench.fill(10, first=11)
    bench.drain(tmp_path / "a", startingOffsets=middle)
    assert bench.written(tmp_path / "a") == N[10:20]
    bench.drain(tmp_path / "b", startingTimestamp=at)
    assert bench.written(tmp_path / "b") == N[10:20]


def test_max_events_per_trigger(bench: Bench, tmp_path: Path) -> None:
    bench.stream(lanes=2)
    bench.fill(60)
    bench.fill(40, first=61)
    sizes = bench.drain(tmp_path, startingOffsets="earliest", maxEventsPerTrigger=30)
    assert sizes == [30, 30, 30, 10]
    assert bench.written(tmp_path) == N


def test_max_events_over_several_streams(bench: Bench, tmp_path: Path) -> None:
    for i, (name, count) in enumerate([("a", 3), ("b", 60), ("c", 37)]):
        bench.stream(name)
        bench.fill(count, to=name, first=[1, 4, 64][i])
    sizes = bench.drain(tmp_path, subscribe="a,b,c", startingOffsets="earliest", maxEventsPerTrigger=25)
    assert max(sizes) <= 25
    assert len(sizes) <= 8
    assert bench.written(tmp_path) == N


def test_partitions(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(100)
    seen: list[int] = []
    df = bench.reading(startingOffsets="earliest", maxEventsPerPartition=20)
    query = (
        df.writeStream.foreachBatch(lambda d, _: seen.append(d.rdd.getNumPartitions()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert seen == [5]


def test_min_events_per_trigger(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(1)
    options = {"startingOffsets": "earliest", "minEventsPerTrigger": 10, "maxTriggerDelay": "1h"}
    with running(bench.query(bench.reading(**options), tmp_path, now=False)) as query:
        wait_for(query, lambda: bench.written(tmp_path) == [1])  # the first trigger does not wait
        for i in range(2, 10):
            bench.fill(1, first=i)
        time.sleep(1.5)
        assert bench.written(tmp_path) == [1], "eight wait"
        bench.fill(2, first=10)
        wait_for(query, lambda: bench.written(tmp_path) == N[:11])
    bench.fill(1, first=12)
    bench.drain(tmp_path, minEventsPerTrigger=10)
    assert bench.written(tmp_path) == N[:12], "available now does not wait"


def test_max_trigger_delay(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(1)
    options = {"startingOffsets": "earliest", "minEventsPerTrigger": 10, "maxTriggerDelay": "300ms"}
    with running(bench.query(bench.reading(**options), tmp_path, now=False)) as query:
        wait_for(query, lambda: bench.written(tmp_path) == [1])
        bench.fill(1, first=2)
        wait_for(query, lambda: bench.written(tmp_path) == [1, 2])


def test_progress_shows_the_latest_offset(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(20)
    query = bench.query(bench.reading(startingOffsets="earliest", maxEventsPerTrigger=5), tmp_path)
    query.awaitTermination()
    source = next(p for p in query.recentProgress if p.numInputRows).sources[0]
    assert json.loads(source.latestOffset)["streams"]["orders"] == json.loads(bench.position())
    assert json.loads(source.endOffset)["streams"]["orders"]["last_id"] == 5


def test_a_group_follows_and_holds_retention(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.c.execute(
        """select postbus.create_group('orders', 'lake', '{"start": "earliest", "ordering": "stream"}')"""
    )
    bench.fill(50)

    def pending() -> int:
        bench.c.execute("select postbus.tick('orders')")
        return int(value(bench.c, "select pending from postbus.list_groups()"))

    assert pending() == 50
    options = {"startingOffsets": "earliest", "maxEventsPerTrigger": 20, "group": "lake"}
    bench.drain(tmp_path, **options)
    assert pending() == 0
    bench.fill(50, first=51)
    with running(bench.query(bench.reading(**options), tmp_path, now=False)) as query:
        wait_for(query, lambda: bench.written(tmp_path) == N)
        bench.fill(1, first=101)
        wait_for(query, lambda: pending() <= 1)


def test_new_streams_join_a_pattern(bench: Bench, tmp_path: Path) -> None:
    bench.stream("o1")
    bench.fill(5, to="o1")
    options = {"subscribePattern": "o.", "startingOffsets": "earliest"}
    bench.drain(tmp_path, **options)
    bench.stream("o2")
    bench.fill(5, to="o2", first=6)
    bench.drain(tmp_path, **options)
    assert bench.written(tmp_path) == N[:10]
    bench.c.execute("select postbus.drop_stream('o1')")
    with fails("belongs to stream 'o1'"):
        bench.drain(tmp_path, **options)
    bench.fill(5, to="o2", first=11)
    bench.drain(tmp_path, **options, failOnDataLoss="false")
    assert bench.written(tmp_path) == N[:15]


def test_offsets_are_stable_and_name_their_holder(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(10)
    bench.drain(tmp_path, startingOffsets="earliest", maxEventsPerTrigger=4)
    found = offsets(tmp_path)
    assert [set(o) - {"begin"} for o in found] == [{"holder", "streams"}] * len(found)
    assert [i for i, o in enumerate(found) if "begin" in o] == [0]
    assert len({o["holder"] for o in found}) == 1
    assert re.fullmatch(r"spark-[0-9a-f]{16}", found[0]["holder"])
    assert (
        value(bench.c, "select count(*) from postbus.held_tick where starts_with(holder, 'spark-now')") == 0
    )
    for _ in range(20):  # upkeep leaves the ticks of the checkpoint alone
        bench.fill(1, first=11)
        bench.c.execute("select * from postbus.maintain()")
    bench.drain(tmp_path)
    assert len(bench.written(tmp_path)) == 30


def test_the_connection_may_go_away(bench: Bench, tmp_path: Path) -> None:
    """The driver's and the tasks' backends are ended again and again; the query does not notice."""
    bench.stream()
    bench.fill(1)
    kill = (
        "select count(pg_terminate_backend(pid)) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    killed = 0
    options = {"startingOffsets": "earliest", "maxEventsPerTrigger": 100}
    with running(bench.query(bench.reading(**options), tmp_path, now=False)) as query:
        for i in range(1, 8):
            bench.fill(1, first=i + 1)
            wait_for(query, lambda n=i: len(bench.written(tmp_path)) >= n)  # type: ignore[misc]
            killed += value(bench.c, kill)
        wait_for(query, lambda: bench.written(tmp_path) == N[:8])
    assert killed > 3


def test_a_replica_for_reading(bench: Bench, tmp_path: Path, db: Database) -> None:
    """Here it is the same server by another name; tests/windows reads from a real replica."""
    bench.stream()
    bench.fill(10)
    other = psycopg.conninfo.make_conninfo(db.dsn, application_name="the replica")
    bench.drain(tmp_path, startingOffsets="earliest", readFrom=other)
    assert bench.written(tmp_path) == N[:10]


@pytest.mark.parametrize("keep", ["true", "false"])
def test_events_that_are_gone(bench: Bench, tmp_path: Path, keep: str) -> None:
    bench.stream(retain=0, rotate_every="10 milliseconds", segments=2)
    bench.fill(5)
    bench.drain(tmp_path, startingOffsets="earliest", maxEventsPerTrigger=3)
    bench.fill(5, first=6)
    floor = "select floor_tick from postbus.stream"
    before = value(bench.c, floor)
    end = time.monotonic() + 20
    while value(bench.c, floor) <= before + 1 and time.monotonic() < end:
        time.sleep(0.02)
        bench.c.execute("select * from postbus.maintain()")
        bench.c.execute("select postbus.publish('orders', '{\"n\": 0}'::text)")
    bench.fill(5, first=11)
    if keep == "true":
        with fails("is lost", "failOnDataLoss"):
            bench.drain(tmp_path)
    else:
        # Also with a group, whose place is lost as well.
        bench.c.execute("select postbus.create_group('orders', 'spark')")
        bench.drain(tmp_path, failOnDataLoss="false", maxEventsPerTrigger=100, group="spark")
        rest = bench.written(tmp_path)
        assert set(N[10:15]) < set(rest)
        assert len(rest) == len(set(rest)) + rest.count(0) - 1
