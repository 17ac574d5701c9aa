"""The server crashes under load, and comes back; or has no connections to give."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from postbus import Bus, Worker
from postbus.embedded import Server
from postbus.engine import install
from tests.conftest import SERVER_SETTINGS, fast_directory
from tests.faults.app import made
from tests.faults.conftest import LONG, Producer, Start, effects, prepare, settled, wait_until_done
from tests.faults.record import Record
from tests.worker.conftest import eventually


def temporary(**settings: Any) -> Server:
    return Server.temporary(settings={**SERVER_SETTINGS, **settings}, inside=fast_directory())


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of the test's own, with the engine."""
    with temporary() as made_server:
        with psycopg.connect(made_server.dsn, autocommit=True) as conn:
            install(conn)
        yield made_server


def crash(server: Server) -> None:
    """``pg_ctl stop -m immediate``: no checkpoint, no goodbye."""
    os.kill(server.pid, signal.SIGQUIT)
    eventually(lambda: not server.running, "it is gone")


def test_immediate_stops_under_load(server: Server, record: Record, start: Start) -> None:
    dsn = server.dsn
    with Bus(dsn) as bus:
        prepare(bus, lease=2)
    common = {"dsn": dsn, "record": str(record.path), "concurrency": 4, "prefetch": 20}
    start(made({**common, "queues": ["jobs"], "streams": ["events"], "maintain": True}))
    with Producer(dsn, record):
        for _ in range(10 if LONG else 3):
            before = record.count("end")
            eventually(lambda: record.count("end") > before + 50, "at work")  # noqa: B023 - called at once
            crash(server)
            server.start()
            back = time.monotonic()
            after = record.count("end")
            eventually(lambda: record.count("end") > after, "resumed")  # noqa: B023
            assert time.monotonic() - back < 10, "within seconds"
    wait_until_done(record, "jobs", "events")
    with Bus(dsn) as bus:
        eventually(lambda: settled(bus), "everything is acked")
    record.check("jobs", excused=True)
    record.check("events", ordered=True, excused=True)


def test_transactional_handlers_under_crashes(server: Server, record: Record, start: Start) -> None:
    dsn = server.dsn
    with Bus(dsn) as bus:
        prepare(bus, lease=2)
    common = {"dsn": dsn, "record": str(record.path), "concurrency": 3, "prefetch": 10, "transactional": True}
    start(made({**common, "queues": ["jobs"], "streams": ["events"]}))
    with Producer(dsn, record, pause=0.005):
        for _ in range(10 if LONG else 2):
            before = record.count("end")
            eventually(lambda: record.count("end") > before + 30, "at work")  # noqa: B023 - called at once
            crash(server)
            server.start()
    wait_until_done(record, "jobs", "events")
    with Bus(dsn) as bus:
        eventually(lambda: settled(bus), "everything is acked")
        for source in ("jobs", "events"):
            found = effects(bus, source)
            known, unknown = record.sent(source), record.sent(source, "unknown")
            assert len(found) == len(set(found)), "an effect happened twice"
            assert known <= set(found) <= known | unknown


def test_stop_while_the_server_is_away(server: Server, record: Record, start: Start) -> None:
    dsn = server.dsn
    with Bus(dsn) as bus:
        prepare(bus, lease=1)
    running = start(
        made({"dsn": dsn, "record": str(record.path), "queues": ["jobs"], "streams": ["events"], "grace": 2})
    )
    with Producer(dsn, record):
        eventually(lambda: record.count("end") > 20, "at work")
        crash(server)
    began = time.monotonic()
    running.stop(within=25)
    assert time.monotonic() - began < 20, "it does not wait for ever"
    server.start()
    start(made({"dsn": dsn, "record": str(record.path), "queues": ["jobs"], "streams": ["events"]}))
    wait_until_done(record, "jobs", "events")
    record.check("jobs", excused=True)
    record.check("events", ordered=True, excused=True)


def test_no_connections_left(record: Record, start: Start) -> None:
    """All connections are taken, at the start and later: the worker waits, and goes on when there are some."""
    with temporary(max_connections=20) as server:
        dsn = server.dsn
        with psycopg.connect(dsn, autocommit=True) as conn:
            install(conn)
        with Bus(dsn, pool_size=1) as bus:
            prepare(bus, lease=2)
        worker: Worker = made(
            {
                "dsn": dsn,
                "record": str(record.path),
                "queues": ["jobs"],
                "streams": ["events"],
                "concurrency": 2,
            }
        )
        with ExitStack() as crowd:
            producer = crowd.enter_context(psycopg.connect(dsn, autocommit=True))
            boss = crowd.enter_context(psycopg.connect(dsn, autocommit=True))
            squatters = fill(dsn)
            running = start(worker, wait=False)
            number = 0
            for _ in range(5 if LONG else 2):
                number += 1
                publish(producer, record, number)
                time.sleep(0.5)  # for what must not happen
                assert number not in record.done("jobs")
                running.check()
                while squatters:
                    squatters.pop().close()
                wait_until_done(record, "jobs", "events", within=30)
                # Take everything away again: what the worker has, and what it could have.
                ours = "pid not in (%s, %s) and datname = current_database()"
                boss.execute(
                    f"select pg_terminate_backend(pid) from pg_stat_activity where {ours}",
                    (producer.info.backend_pid, boss.info.backend_pid),
                )
                squatters = fill(dsn)
            while squatters:
                squatters.pop().close()
            number += 1
            publish(producer, record, number)
            wait_until_done(record, "jobs", "events", within=30)
        running.stop()
        record.check("jobs")
        record.check("events", ordered=True)


def fill(dsn: str) -> list[psycopg.Connection[Any]]:
    """Connect until there are no connections left, and stay so for a moment."""
    found: list[psycopg.Connection[Any]] = []
    refused = 0
    while refused < 20:
        try:
            found.append(psycopg.connect(dsn, autocommit=True))
        except psycopg.OperationalError:
            refused += 1
            time.sleep(0.01)
    return found


def publish(conn: psycopg.Connection[Any], record: Record, number: int) -> None:
    with conn.transaction():
        conn.execute("select postbus.send('jobs', %s::text, key => 'k')", (str(number),))
        conn.execute("select postbus.publish('events', %s::text, key => 'k')", (str(number),))
    for source in ("jobs", "events"):
        record.note(source, number, "k", 0, "ok")
