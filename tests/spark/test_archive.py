"""archive: streams to a lake table, once each, and what the streams keep until then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from postbus.errors import AlreadyExists, BadArgument, NotFound, PositionLost, PostbusError
from postbus.lake import open_table
from postbus.pipelines import Run, archive, replay
from tests.cli.terminal import Terminal
from tests.spark.lake import Bench
from tests.stress.sessions import value

QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"  # Java that starts quickly


def run(bench: Bench, lake: Path, *streams: str, **options: Any) -> Run:
    done = archive(streams or ("orders",), dsn=bench.db.dsn, lake=lake, spark=bench.spark, **options)
    assert isinstance(done, Run)
    return done


def archived(lake: Path, table: str = "events") -> list[tuple[str, int, str]]:
    rows = open_table(str(lake), table).read(["stream", "id", "payload"]).to_pylist()
    return sorted((r["stream"], r["id"], r["payload"]) for r in rows)


def truth(bench: Bench) -> list[tuple[str, int, str]]:
    query = "select s.name, l.id, l.payload from postbus.log l join postbus.stream s on s.id = l.stream_id"
    return sorted(bench.c.execute(query).fetchall())


def stats(bench: Bench, *columns: str, of: str = "events") -> Any:
    query = f"select {', '.join(columns)} from postbus.pipeline_stats() where pipeline = %s"
    (row,) = bench.c.execute(query.encode(), [of]).fetchall()
    return row if len(columns) > 1 else row[0]


def test_what_is_new_each_time(bench: Bench, tmp_path: Path) -> None:
    bench.stream(lanes=2)
    bench.stream("refunds")
    bench.fill(100)
    bench.fill(20, to="refunds")
    seen: list[tuple[int, int | None, str]] = []
    first = run(bench, tmp_path, "orders", "refunds", max_events=50, progress=lambda *a: seen.append(a))
    assert archived(tmp_path) == truth(bench)
    assert (first.rows, first.state, first.kind, first.pipeline) == (120, "done", "archive", "events")
    assert first.bytes == sum(f.size for f in open_table(str(tmp_path), "events").files()) > 0
    assert first.since == {"orders": "earliest", "refunds": "earliest"}
    assert first.until is not None
    assert {s: p["stream"] for s, p in first.until.items()} == {"orders": "orders", "refunds": "refunds"}
    assert seen[0] == (0, 120, "archive to events")
    assert seen[-1] == (120, 120, "archive to events")
    table = open_table(str(tmp_path), "events")
    assert table.partition_by == ("stream", "date")
    assert table.writer() == "archive.events"
    day = value(bench.c, "select distinct (at at time zone 'UTC')::date from postbus.log")
    assert {(f.partition["stream"], f.partition["date"]) for f in table.files()} == {
        ("orders", str(day)), ("refunds", str(day)),
    }  # fmt: skip
    # The group is at the end although Spark's own commit lags one batch.
    assert stats(bench, "pending", "lag_seconds", "total_rows", "state", "runs") == (0, 0, 120, "done", 1)

    again = run(bench, tmp_path, "orders", "refunds")
    assert (again.rows, again.bytes, again.until) == (0, 0, first.until)
    bench.fill(5, first=101)
    bench.stream("new")
    bench.fill(3, to="new")
    third = run(bench, tmp_path, "orders", "refunds", "new", compact=True)
    assert third.rows == 8
    assert archived(tmp_path) == truth(bench)
    assert len(open_table(str(tmp_path), "events").files()) == 3
    assert stats(bench, "total_rows", "runs", "failures", "pending") == (128, 3, 0, 0)
    assert stats(bench, "until") == third.until


def test_a_batch_that_comes_again(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(30)
    run(bench, tmp_path, max_events=10)
    # As if the driver had died between the table's commit and the query's.
    commits = tmp_path / "_postbus" / "checkpoints" / "events" / "commits"
    (commits / "2").unlink()
    (commits / ".2.crc").unlink(missing_ok=True)
    run(bench, tmp_path)
    assert archived(tmp_path) == truth(bench)


def test_iceberg(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(10)
    for count in (10, 5):
        done = run(bench, tmp_path, format="iceberg", name="ice", table="iced")
        assert done.rows == count
        bench.fill(5, first=11)
    table = open_table(str(tmp_path), "iced", format="iceberg", dsn=bench.db.dsn)
    assert table.read(["id"]).num_rows == 15
    assert table.writer() == "archive.ice"
    assert stats(bench, "pending", of="ice") == 5
    bench.stream("again")
    there = {"lake": tmp_path, "table": "iced", "format": "iceberg", "to_stream": "again", "name": "back"}
    given: dict[str, Any] = {"dsn": bench.db.dsn, "spark": bench.spark, **there}
    assert replay(**given).rows == 15
    run(bench, tmp_path, format="iceberg", name="ice", table="iced")
    assert replay(**given).rows == 0


def test_segments_wait_for_the_archive(bench: Bench, tmp_path: Path) -> None:
    bench.stream(retain="0 seconds", rotate_every="1 millisecond")
    bench.fill(10)
    run(bench, tmp_path)
    bench.fill(10, first=11)

    def kept() -> int:
        for _ in range(10):
            bench.c.execute("select postbus.maintain()")
        return int(value(bench.c, "select count(*) from postbus.log"))

    assert kept() >= 10, "the last ten are not archived yet"
    run(bench, tmp_path)
    assert kept() == 0
    assert len(archived(tmp_path)) == 20
    # Nobody holds them back any more, and they are gone: that is not passed over in silence.
    bench.fill(10, first=21)
    bench.c.execute("select postbus.drop_group('orders', 'archive.events')")
    assert kept() == 0
    bench.fill(5, first=31)
    with failing(PositionLost, "no longer kept", "--skip-lost"):
        run(bench, tmp_path)
    assert run(bench, tmp_path, skip_lost=True).rows == 5
    assert len(archived(tmp_path)) == 25


def test_follow_until_told_to_stop(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.fill(10)
    stop = threading.Event()
    first = iter([True])

    def progress(rows: int, total: int | None, text: str) -> None:
        if rows == 10 and next(first, False):
            # The server ends every session, and the run goes on.
            bench.c.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            bench.fill(10, first=11)
        if rows == 20:
            stop.set()

    done = run(bench, tmp_path, follow=True, every=0.1, progress=progress, stop=stop)
    assert next(first, None) is None
    assert (done.rows, done.state) == (20, "done")
    assert archived(tmp_path) == truth(bench)
    assert stats(bench, "pending") == 0


@contextmanager
def failing(error: type[PostbusError], *saying: str) -> Iterator[None]:
    with pytest.raises(error) as e:
        yield
    for words in saying:
        assert words in str(e.value), str(e.value)


def test_bad_input(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.stream("other")
    bench.fill(10)
    with failing(NotFound, "no stream 'nowhere'", "There are: orders, other"):
        run(bench, tmp_path, "orders", "nowhere")
    assert value(bench.c, "select count(*) from postbus.pipeline_stats()") == 0
    run(bench, tmp_path)
    assert len(archived(tmp_path)) == 10
    with failing(BadArgument, "belongs to stream 'orders'", "--name"):
        run(bench, tmp_path, "other")
    with failing(BadArgument, "has lake", "--name"):
        run(bench, tmp_path / "elsewhere")
    with failing(AlreadyExists, "is written by 'archive.events'"):
        run(bench, tmp_path, name="mine")
    with failing(AlreadyExists, "is of format delta"):
        run(bench, tmp_path, name="mine", format="iceberg")
    assert stats(bench, "state", "error", of="mine")[0] == "failed"
    # None of them has left a group that would hold events back.
    groups = 'select stream, "group" from postbus.list_groups()'
    assert bench.c.execute(groups).fetchall() == [("orders", "archive.events")]
    checkpoint = tmp_path / "_postbus" / "checkpoints" / "events"
    checkpoint.rename(tmp_path / "away")
    with failing(NotFound, "there is no checkpoint", "twice"):
        run(bench, tmp_path)
    (tmp_path / "away").rename(checkpoint)
    run(bench, tmp_path)
    shutil.rmtree(tmp_path / "events")
    with failing(BadArgument, "there is no lake table events", "begin anew"):
        run(bench, tmp_path)


def test_a_reader_of_the_database_is_told_what_is_missing(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    role = f"archivist_of_{bench.db.name}"
    bench.c.execute(f"create role {role} login in role postbus_writer".encode())
    try:
        dsn = f"{bench.db.dsn} user={role}"
        with failing(PostbusError, "may not make it", "create_group('orders', 'archive.events'"):
            archive("orders", dsn=dsn, lake=tmp_path, spark=bench.spark)
        bench.c.execute(
            "select postbus.create_group('orders', 'archive.events', "
            '\'{"ordering": "stream", "start": "earliest"}\')'
        )
        bench.fill(3)
        assert archive("orders", dsn=dsn, lake=tmp_path, spark=bench.spark).rows == 3
    finally:
        bench.c.execute(f"drop role {role}".encode())


@contextmanager
def command(bench: Bench, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command line as a process of its own, with its JVM and workers: all of it is gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "postbus", "pipeline", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "POSTBUS_DSN": bench.db.dsn, "SPARK_SUBMIT_OPTS": QUICK},
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def reach(bench: Bench, ended: Callable[[], Any], rows: int, of: str = "events") -> None:
    """Until the run of a process has written so many rows."""
    query = "select state, rows from postbus.pipeline_stats() where pipeline = %s"
    for _ in range(2000):
        assert ended() is None
        there = bench.c.execute(query, [of]).fetchone()
        if there is not None and there[0] == "running" and there[1] >= rows:
            return
        time.sleep(0.1)
    raise AssertionError(f"not {rows} rows in 200 s")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_asked_to_end(bench: Bench, tmp_path: Path) -> None:
    bench.stream(lanes=2)
    bench.fill(400)
    given = ("archive", "orders", "--lake", str(tmp_path), "--max-events", "40", "--follow", "--every", "0.1")
    with command(bench, *given) as process:
        reach(bench, process.poll, 80)
    # And once more, in a terminal, with Ctrl-C.
    with Terminal(bench.db.dsn, "pipeline", *given, SPARK_SUBMIT_OPTS=QUICK) as terminal:
        reach(bench, terminal.process.poll, 80)
        bench.fill(100, first=401)
        terminal.type(b"\x03")
        assert terminal.end(60) == 0, terminal.text
        assert "starting Spark" in terminal.text, "the bar"
        assert "archive to events" in terminal.text
        assert "rows/s), run 2 of events" in terminal.text, "the closing line"
        assert "Traceback" not in terminal.text
        assert " WARN " not in terminal.text
    assert stats(bench, "state", "runs", "failures") == ("done", 2, 1)
    run(bench, tmp_path)
    there = archived(tmp_path)
    assert len(there) == len(set(there)), "nothing twice"
    assert there == truth(bench)
    states = [r[0] for r in bench.c.execute("select state from postbus.list_runs('events')").fetchall()]
    assert states == ["done", "done", "abandoned"]
