"""The server crashes under load, and comes back; or has no connections to give."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from tests.worker.waiting import eventually

MAX_CONNECTIONS = 20


@contextmanager
def served(**settings: Any) -> Iterator[Server]:
    """A server of the test's own that can be started again, with the engine."""
    quick = {"fsync": "off", "full_page_writes": "off"}  # the machine does not crash
    settings = {**SERVER_SETTINGS, **quick, **settings}
    with (
        tempfile.TemporaryDirectory(dir=fast_directory()) as directory,
        Server(Path(directory) / "pg", settings=settings) as made_server,
    ):
        with psycopg.connect(made_server.dsn, autocommit=True) as conn:
            install(conn)
        yield made_server


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as made_server:
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
    """All connections are taken, at the start and later: the worker waits, and then goes on."""
    with served(max_connections=MAX_CONNECTIONS) as server:
        dsn = server.dsn
        with Bus(dsn, pool_size=1) as bus:
            prepare(bus, lease=30)
        worker: Worker = made(
            {
                "dsn": dsn,
                "record": str(record.path),
                "queues": ["jobs"],
                "streams": ["events"],
                "concurrency": 2,
            }
        )
        with psycopg.connect(dsn, autocommit=True) as producer, Crowd(dsn, others=1) as crowd:
            crowd.fill()
            running = start(worker, wait=False)
            number = 0
            for _ in range(5 if LONG else 2):
                number += 1
                publish(producer, record, number)
                time.sleep(0.5)  # for what must not happen
                assert number not in record.done("jobs")
                running.check()
                crowd.leave()
                wait_until_done(record, "jobs", "events", within=30)
                crowd.fill()
            crowd.leave()
            number += 1
            publish(producer, record, number)
            wait_until_done(record, "jobs", "events", within=30)
        running.stop()
        record.check("jobs")
        record.check("events", ordered=True)


class Crowd:
    """Takes all connections that a server has; `others` are somebody else's."""

    def __init__(self, dsn: str, others: int) -> None:
        self._dsn = dsn
        self._count = MAX_CONNECTIONS - others - 1
        self._boss = psycopg.connect(dsn, autocommit=True, application_name="boss")
        self._squatters: list[psycopg.Connection[Any]] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *args: object) -> None:
        self.leave()
        self._boss.close()

    def fill(self) -> None:
        """Take what is free and what workers have, until every single one is ours."""
        until = time.monotonic() + 30
        while len(self._squatters) < self._count:
            assert time.monotonic() < until
            try:
                self._squatters.append(psycopg.connect(self._dsn, application_name="squatter"))
            except psycopg.OperationalError:
                ours = "from pg_stat_activity where application_name = 'postbus'"
                self._boss.execute(f"select pg_terminate_backend(pid) {ours}")

    def leave(self) -> None:
        while self._squatters:
            self._squatters.pop().close()


def publish(conn: psycopg.Connection[Any], record: Record, number: int) -> None:
    with conn.transaction():
        conn.execute("select postbus.send('jobs', %s::text, key => 'k')", (str(number),))
        conn.execute("select postbus.publish('events', %s::text, key => 'k')", (str(number),))
    for source in ("jobs", "events"):
        record.note(source, number, "k", 0, "ok")
