"""A database that goes away, queues that are dropped, positions that are lost: the worker goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import psycopg
import pytest

from postbus import Bus, Message, Worker
from tests.conftest import Database
from tests.worker.conftest import Start, empty
from tests.worker.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from postbus.worker import _subscription

    monkeypatch.setattr(_subscription, "_PAUSE", (0.05, 0.2))


def terminate(db: Database) -> None:
    """End all connections to the database but this one."""
    with psycopg.connect(db.dsn, autocommit=True) as conn:
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )


def test_connections_that_break(
    worker: Worker, bus: Bus, db: Database, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[Any] = []
    begun, go = threading.Event(), threading.Event()

    @worker.queue("q", create=True, concurrency=4)
    def handle(m: Message[Any]) -> None:
        if m.payload == "at work":
            begun.set()
            assert go.wait(30)
        handled.append(m.payload)

    running = start(worker)
    with caplog.at_level(logging.WARNING, "postbus"):
        bus.queue("q").send("at work")
        assert begun.wait(30)
        terminate(db)
        go.set()
        for n in range(5):
            with Bus(db.dsn) as fresh:
                fresh.queue("q").send(n)
            if n % 2:
                terminate(db)
        with Bus(db.dsn) as fresh:
            eventually(lambda: len(handled) >= 6, "all handled")
            eventually(empty(fresh, "q"), "all acked")
    assert handled.count("at work") == 1, "the ack is told when the connection is back"
    running.check()
    assert not [r for r in caplog.records if r.exc_info], "no tracebacks"


def test_dropped_queue(worker: Worker, bus: Bus, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[Any] = []

    async def handle(m: Message[Any]) -> None:
        handled.append((m.source, m.payload))

    bus.queue("a", create=True)
    bus.queue("b", create=True)
    worker.queue("a", concurrency=5)(handle)
    worker.queue("b")(handle)
    running = start(worker)
    with caplog.at_level(logging.WARNING, "postbus"):
        bus.fetch("select postbus.drop_queue('a')", ())
        eventually(lambda: worker.subscriptions[0].problem, "noticed")
        assert "does not exist" in str(worker.subscriptions[0].problem)
        bus.queue("b").send(1)
        eventually(lambda: handled == [("b", 1)], "the others go on")
        running.check()
        bus.queue("a", create=True).send(2)
        eventually(lambda: handled == [("b", 1), ("a", 2)], "and it too, when it is back")
    assert worker.subscriptions[0].problem is None
    assert "queue 'a' does not exist Create it" in caplog.text
    running.stop()
    gc.collect()  # for what asyncio says of tasks that nobody asked how they ended
    assert not [r for r in caplog.records if r.exc_info], "no tracebacks"


def test_queue_that_is_dropped_while_handlers_are_at_work(
    worker: Worker, bus: Bus, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go = threading.Event(), threading.Event()
    handled: list[Any] = []

    @worker.queue("q", create=True)
    def handle(m: Message[Any]) -> None:
        begun.set()
        assert go.wait(30)
        handled.append(m.payload)

    running = start(worker)
    bus.queue("q").send(1)
    assert begun.wait(30)
    with caplog.at_level(logging.WARNING, "postbus"):
        bus.fetch("select postbus.drop_queue('q', true)", ())
        go.set()
        eventually(lambda: handled == [1], "finished, for what it is worth")
        eventually(lambda: bus.fetch("select name from postbus.list_queues()", ()) == [("q",)], "made again")
        bus.queue("q").send(2)
        eventually(lambda: handled == [1, 2], "and goes on")
    running.check()
    assert not [r for r in caplog.records if r.exc_info], "no tracebacks"


def test_dropped_group(worker: Worker, bus: Bus, start: Start) -> None:
    handled: list[Any] = []
    events = bus.stream("s", create=True)

    @worker.stream("s", group="g", start="earliest")
    async def handle(m: Message[Any]) -> None:
        handled.append(m.payload)

    start(worker)
    events.publish(1)
    eventually(lambda: handled == [1], "handled")
    bus.fetch("select postbus.drop_group('s', 'g')", ())
    eventually(lambda: bus.fetch("select count(*) from postbus.list_groups()", ()) == [(1,)], "made again")
    eventually(lambda: handled == [1, 1], "from the earliest, as it was told")


def test_paused_queue(worker: Worker, bus: Bus, start: Start) -> None:
    handled: list[Any] = []

    @worker.queue("q", create=True)
    async def handle(m: Message[Any]) -> None:
        handled.append(m.payload)

    start(worker)
    bus.fetch("select postbus.pause('q')", ())
    bus.queue("q").send(1)
    looks = worker.subscriptions[0]
    at = looks.fetched_at
    assert at is not None
    eventually(lambda: (looks.fetched_at or 0) > at, "it has looked")
    assert handled == []
    bus.fetch("select postbus.resume('q')", ())
    eventually(lambda: handled == [1], "goes on")


def test_lost_lease_stops_the_handler(
    worker: Worker, bus: Bus, db: Database, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    begun, stopped = threading.Event(), threading.Event()

    @worker.queue("q", create=True, lease=0.9)
    async def handle(m: Message[Any]) -> None:
        if m.payload != "long":
            return
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    running = start(worker)
    bus.queue("q").send("long")
    assert begun.wait(30)
    thief = db.connect()
    thief.execute("set postbus.fake_now = '2100-01-01'")
    with caplog.at_level(logging.WARNING, "postbus"):
        assert thief.execute("select count(*) from postbus.receive('q')").fetchone() == (1,)
        assert stopped.wait(10), "told when the lease is to be extended"
    bus.queue("q").send("short")
    eventually(lambda: worker.subscriptions[0].attempts.handled == 1, "it goes on")
    running.check()
    assert bus.fetch("select attempt from postbus.peek('q', 'in_flight')", ()) == [(2,)], (
        "nothing was changed"
    )


def test_leases_are_extended_while_a_handler_runs(worker: Worker, bus: Bus, start: Start) -> None:
    go = threading.Event()
    begun: list[int] = []

    @worker.queue("q", create=True, lease=0.3, concurrency=2)
    def handle(m: Message[Any]) -> None:
        begun.append(m.attempt)
        go.wait(1.2)

    start(worker)
    bus.queue("q").send(1)
    eventually(empty(bus, "q"), "done")
    assert begun == [1], "four leases long, and nobody else got it"


def test_lost_position(worker: Worker, bus: Bus, db: Database, start: Start) -> None:
    """An explicit problem, never silence."""
    events = bus.stream("s", create=True)

    @worker.stream("s", group="g", start="earliest")
    async def handle(m: Message[Any]) -> None: ...

    start(worker)
    events.publish(1)
    eventually(lambda: worker.subscriptions[0].attempts.handled == 1, "handled")
    bus.fetch("select postbus.pause('s')", ())
    db.connect().execute("update postbus.stream set floor_tick = 1000000")
    bus.fetch("select postbus.resume('s')", ())
    events.publish(2)
    problem = eventually(lambda: worker.subscriptions[0].problem, "noticed")
    assert "seek" in problem, "with the remedy"
