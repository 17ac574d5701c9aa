"""Records of runs: one at a time, abandoned when the process is gone, with lag and totals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from postbus.errors import AlreadyExists, BadArgument, LeaseLost, NotFound
from postbus.pipelines import Recorder
from tests.conftest import Database
from tests.engine.bus import refused
from tests.stress.sessions import value


def stats(c: psycopg.Connection[Any], *columns: str, of: str = "events") -> Any:
    query = f"select {', '.join(columns)} from postbus.pipeline_stats() where pipeline = %s"
    (row,) = c.execute(query.encode(), [of]).fetchall()
    return row if len(columns) > 1 else row[0]


def test_a_run_from_begin_to_end(db: Database) -> None:
    c = db.connect()
    with Recorder(db.dsn, "events", "archive", {"lake": "here"}) as run:
        assert run.before == {}
        run.report(rows=10, bytes=100, since={"orders": 1}, until={"orders": 2}, total=30)
        assert stats(c, "state", "rows", "bytes", "total", "ended_at") == ("running", 10, 100, 30, None)
        run.report(rows=20)  # within the second: told at the end
        assert stats(c, "rows") == 10
        done = run.finish()
    assert (done.rows, done.bytes, done.state, done.error) == (20, 100, "done", None)
    assert (done.since, done.until) == ({"orders": 1}, {"orders": 2})
    assert done.seconds > 0
    with Recorder(db.dsn, "events", "archive", {"lake": "there"}) as run:
        assert run.before == {"since": {"orders": 1}, "until": {"orders": 2}, "options": {"lake": "here"}}
        run.report(rows=5, until={"orders": 3})
    assert stats(c, "state", "rows", "total_rows", "total_bytes", "runs", "failures", "until") == (
        ("done", 5, 25, 100, 2, 0, {"orders": 3})
    )
    run = Recorder(db.dsn, "events", "archive")

    def fail() -> None:
        with run:
            run.report(rows=1)
            run.report(rows=2)
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        fail()
    assert stats(c, "state", "rows", "total_rows", "failures", "error", "until") == (
        ("failed", 2, 27, 1, "by zero", {"orders": 3})
    )
    query = "select run, state, rows, error, since, options from postbus.list_runs('events')"
    assert c.execute(query).fetchall() == [
        (3, "failed", 2, "by zero", None, {}),
        (2, "done", 5, None, None, {"lake": "there"}),
        (1, "done", 20, None, {"orders": 1}, {"lake": "here"}),
    ]
    assert len(c.execute("select from postbus.list_runs(max => 2)").fetchall()) == 2


def test_a_second_run_is_refused(db: Database) -> None:
    c = db.connect()
    with Recorder(db.dsn, "events", "archive") as run:
        with (
            pytest.raises(AlreadyExists, match="running already: run 1") as e,
            Recorder(db.dsn, "events", "archive"),
        ):
            pass
        assert "pg_terminate_backend" in (e.value.hint or "")
        with Recorder(db.dsn, "others", "archive"):
            pass
        run.report(rows=1, now=True)
        with refused("PB003", "is running"):
            c.execute("select postbus.drop_pipeline('events')")
    assert stats(c, "runs", "failures", "state") == (1, 0, "done")
    with (
        pytest.raises(AlreadyExists, match="is of kind archive, not mirror"),
        Recorder(db.dsn, "events", "mirror"),
    ):
        pass
    # In one session too, and a begin that was rolled back is in nobody's way.
    s = db.connect(autocommit=False)
    s.execute("select postbus.begin_run('events', 'archive')")
    s.rollback()
    s.execute("select postbus.begin_run('events', 'archive')")
    s.commit()
    with refused("PB002", "running already"):
        s.execute("select postbus.begin_run('events', 'archive')")
    s.rollback()
    with refused("PB002", "running already"):
        c.execute("select postbus.begin_run('events', 'archive')")


def test_of_many_at_once_one_runs(db: Database) -> None:
    together = threading.Barrier(8)

    def begin() -> Recorder | None:
        run = Recorder(db.dsn, "events", "archive")
        together.wait()
        try:
            return run.__enter__()
        except AlreadyExists:
            return None

    with ThreadPoolExecutor(8) as pool:
        runs = [r for r in pool.map(lambda _: begin(), range(8)) if r is not None]
    assert len(runs) == 1
    assert runs[0].finish().state == "done"
    runs[0].close()
    assert stats(db.connect(), "runs", "failures") == (1, 0)


HELD = """
import sys
from postbus.pipelines import Recorder
with Recorder(sys.argv[1], "events", "archive") as run:
    run.report(rows=7, until={"orders": 4}, now=True)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_run_of_a_dead_process_is_abandoned(db: Database) -> None:
    c = db.connect()
    command = [sys.executable, "-c", HELD, db.dsn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert stats(c, "state") == "running"
        pid = value(c, "select pid from pg_stat_activity where application_name = 'postbus pipeline events'")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    # Until the server has read from the closed socket; 10 s are far too many.
    gone = "select count(*) from pg_stat_activity where pid = %s"
    for _ in range(1000):
        if value(c, gone, pid) == 0:
            break
        time.sleep(0.01)
    assert stats(c, "state", "rows", "ended_at") == ("abandoned", 7, None)
    health = "select message from postbus.health() where object = 'pipeline events'"
    assert "was abandoned" in value(c, health)
    with Recorder(db.dsn, "events", "archive") as run:
        assert run.before["until"] == {"orders": 4}
    states = c.execute("select state, ended_at is not null from postbus.list_runs('events')").fetchall()
    assert states == [("done", True), ("abandoned", True)]
    assert stats(c, "failures", "runs", "total_rows") == (1, 2, 7)
    assert value(c, f"select count(*) from ({health}) x") == 0


def kill_session(c: psycopg.Connection[Any]) -> None:
    query = (
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name like %s"
        " and datname = current_database()"
    )
    assert value(c, query, "postbus pipeline%") is True


def test_a_lost_session_is_taken_up_again_unless_another_run_was_quicker(db: Database) -> None:
    c = db.connect()
    with Recorder(db.dsn, "events", "archive") as run:
        kill_session(c)
        assert stats(c, "state") == "abandoned"
        run.report(rows=3, now=True)
        assert stats(c, "state", "rows") == ("running", 3)
        with refused("PB002", "running already"):
            c.execute("select postbus.begin_run('events', 'archive')")
    assert stats(c, "state") == "done"
    run = Recorder(db.dsn, "events", "archive").__enter__()
    kill_session(c)
    second = value(c, "select postbus.begin_run('events', 'archive')")
    with pytest.raises(LeaseLost, match="is over: abandoned"):
        run.report(rows=3, now=True)
    with pytest.raises(LeaseLost):
        run.__exit__(None, None, None)
    assert stats(c, "state", "rows", "failures") == ("running", 0, 1)
    c.execute("select postbus.end_run(%s)", [second])
    c.execute("select postbus.end_run(%s)", [second])
    with refused("PB004", "is over: done"):
        c.execute("select postbus.end_run(%s, 'too late')", [second])


def test_lag_is_that_of_the_group(db: Database) -> None:
    c = db.connect()
    group = Jsonb({"ordering": "stream", "start": "earliest"})
    for stream in ("a", "b", "c"):
        c.execute("select postbus.create_stream(%s)", [stream])
        c.execute("select postbus.create_group(%s, 'archive.events', %s)", [stream, group])
        c.execute("select postbus.publish(%s, 'x') from generate_series(1, 3)", [stream])
    with Recorder(db.dsn, "events", "archive", streams=["a", "b"], group="archive.events"):
        assert stats(c, "pending", "streams") == (6, ["a", "b"])
        assert 0 < stats(c, "lag_seconds") < 60
        c.execute("select postbus.follow_group('a', 'archive.events', postbus.position('a'))")
        assert stats(c, "pending") == 3
        c.execute("select postbus.follow_group('b', 'archive.events', postbus.position('b'))")
        assert stats(c, "pending", "lag_seconds") == (0, 0)
    with Recorder(db.dsn, "all", "archive", group="archive.events"):
        assert stats(c, "pending", of="all") == 3
    with Recorder(db.dsn, "none", "report"):
        assert stats(c, "pending", "lag_seconds", of="none") == (None, None)
    found = c.execute(
        'select name, value from postbus.metrics() where labels = \'{"pipeline": "all", "kind": "archive"}\''
    ).fetchall()
    got = {name.removeprefix("postbus.pipeline."): v for name, v in found}
    assert got.pop("lag_seconds") > 0
    assert got.pop("run_seconds") > 0
    assert got == {
        "running": 0, "failed": 0, "pending_events": 3, "run_rows": 0, "rows_total": 0, "bytes_total": 0,
        "runs_total": 1, "failures_total": 0,
    }  # fmt: skip
    # A dropped pipeline holds nothing back any more.
    c.execute("select postbus.drop_pipeline('events')")
    left = c.execute('select stream from postbus.list_groups() where "group" = %s', ["archive.events"])
    assert left.fetchall() == [("c",)]
    with refused("PB001", "does not exist"):
        c.execute("select postbus.list_runs('events')")


def test_old_runs_are_pruned(db: Database) -> None:
    c = db.connect()
    c.execute("select postbus.end_run(postbus.begin_run('often', 'archive')) from generate_series(1, 1010)")
    c.execute("select set_config('postbus.fake_now', '2000-01-01', false)")
    c.execute("select postbus.end_run(postbus.begin_run('old', 'archive')) from generate_series(1, 3)")
    c.execute("select set_config('postbus.fake_now', '', false)")
    pruned = c.execute("select step, done from postbus.maintain() where object = 'pipelines'").fetchall()
    assert pruned == [("runs", 12)]
    assert stats(c, "runs", of="often") == 1010
    kept = c.execute(
        "select pipeline, count(*), max(run) from postbus.list_runs(max => 5000) group by 1"
    ).fetchall()
    assert sorted(kept) == [("often", 1000, 1010), ("old", 1, 1013)]


def test_bad_input(db: Database, emptydb: Database) -> None:
    c = db.connect()
    with pytest.raises(BadArgument, match="bad pipeline name"), Recorder(db.dsn, "a b", "archive"):
        pass
    with pytest.raises(NotFound, match="no postbus engine"), Recorder(emptydb.dsn, "events", "archive"):
        pass
    for call, state in {
        "begin_run('a', 'archive', '[]')": "PB003", "begin_run('a', 'ar chive')": "PB003",
        "report_run(1, 0, 0)": "PB001", "end_run(null)": "PB001", "drop_pipeline('a')": "PB001",
        "list_runs('a')": "PB001", "list_runs(max => 0)": "PB003", "pipeline_stats(0)": "PB003",
    }.items():  # fmt: skip
        with refused(state):
            c.execute(f"select postbus.{call}".encode())
    run = value(c, "select postbus.begin_run('a', 'archive')")
    with refused("PB003", "of at least 0"):
        c.execute("select postbus.report_run(%s, -1, 0)", [run])
