"""Ending: what was begun is finished, what was not is given back, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql

from postbus import BadArgument, Bus, Message, Worker
from tests.conftest import Database
from tests.worker.conftest import Running, Start, messages
from tests.worker.waiting import eventually


@pytest.fixture
def q(bus: Bus) -> str:
    bus.queue("q", create=True)
    return "q"


def test_what_was_begun_is_finished_and_the_rest_given_back(
    worker: Worker, bus: Bus, start: Start, q: str
) -> None:
    begun, go = threading.Semaphore(0), threading.Event()

    @worker.queue(q, concurrency=2, prefetch=8)
    def handle(m: Message[Any]) -> None:
        begun.release()
        assert go.wait(30)

    bus.queue(q).send_batch(list(range(8)))
    running = start(worker)
    for _ in range(2):
        assert begun.acquire(timeout=30)
    eventually(lambda: [s for _, s, _ in messages(bus, q)] == ["in_flight"] * 8, "all are taken")
    worker.stop()
    eventually(
        lambda: sorted(s for _, s, _ in messages(bus, q)) == ["in_flight"] * 2 + ["ready"] * 6,
        "given back at once, while handlers are still at work",
    )
    assert [a for _, s, a in messages(bus, q) if s == "ready"] == [0] * 6, "the attempt does not count"
    go.set()
    running.join()
    assert [s for _, s, _ in messages(bus, q)] == ["ready"] * 6


def test_in_order(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True, lanes=2)
    begun, go = threading.Semaphore(0), threading.Event()
    seen: list[Any] = []

    def handle(m: Message[Any]) -> None:
        begun.release()
        assert go.wait(30)
        seen.append((m.key, m.payload, m.attempt))

    worker.stream("s", group="g", ordering="key", start="earliest", concurrency=4)(handle)
    running = start(worker)
    events.publish_batch(list(range(12)), key=["a", "b", "c"] * 4)
    for _ in range(3):
        assert begun.acquire(timeout=30)
    worker.stop()
    go.set()
    running.join()
    assert sorted(seen) == [("a", 0, 1), ("b", 1, 1), ("c", 2, 1)]
    other = Worker(worker.dsn, maintain=False)
    other.stream("s", group="g", concurrency=4)(handle)
    start(other)
    eventually(lambda: len(seen) == 12, "the next one goes on at once", within=10)
    for key, numbers in (("a", [0, 3, 6, 9]), ("b", [1, 4, 7, 10]), ("c", [2, 5, 8, 11])):
        assert [n for k, n, _ in seen if k == key] == numbers
    assert {attempt for _, _, attempt in seen} == {1}


@pytest.mark.parametrize("kind", ["loop", "thread", "transactional thread"])
def test_handlers_that_take_longer_than_the_grace(
    db: Database, bus: Bus, start: Start, q: str, kind: str
) -> None:
    worker = Worker(db.dsn, maintain=False, grace=0.3)
    begun, never = threading.Event(), threading.Event()
    cancelled = threading.Event()

    if kind == "loop":

        @worker.queue(q)
        async def handle(m: Message[Any]) -> None:
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                cancelled.set()

    else:

        @worker.queue(q, transactional=kind == "transactional thread")
        def handle_in_thread(m: Message[Any], conn: Any = None) -> None:
            begun.set()
            never.wait(600)

    running = start(worker)
    bus.queue(q).send("x")
    assert begun.wait(30)
    took = running.stop()
    never.set()
    assert 0.25 < took < 10
    assert cancelled.is_set() is (kind == "loop")
    assert messages(bus, q) == [('"x"', "ready", 1)], "it comes again, and this attempt counts"


def test_handler_that_does_not_let_itself_be_cancelled(db: Database, bus: Bus, start: Start, q: str) -> None:
    worker = Worker(db.dsn, maintain=False, grace=0.1)
    begun = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    let_go = threading.Event()

    @worker.queue(q)
    async def handle(m: Message[Any]) -> None:
        if m.payload == "good":
            return
        begun.set()
        loops.append(asyncio.get_running_loop())
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    running = start(worker)
    bus.queue(q).send("x")
    assert begun.wait(30)
    worker.stop()
    # The end of the loop waits for it, but the worker has given it up before: it stays on its lease.
    eventually(lambda: worker.subscriptions == [], "ended without it", within=10)
    assert messages(bus, q) == [('"x"', "in_flight", 1)]
    let_go.set()
    running.join()


def test_rate_and_slots_do_not_delay_the_end(db: Database, bus: Bus, start: Start, q: str) -> None:
    worker = Worker(db.dsn, maintain=False, concurrency=1, grace=30)
    begun, go = threading.Event(), threading.Event()
    handled: list[Any] = []

    @worker.queue(q, rate=0.001, burst=1, concurrency=3, prefetch=6)
    async def limited(m: Message[Any]) -> None:
        handled.append(m.payload)

    bus.queue("slow", create=True)

    @worker.queue("slow", concurrency=3, prefetch=6)
    def slow(m: Message[Any]) -> None:
        begun.set()
        assert go.wait(30)

    running = start(worker)
    bus.queue(q).send_batch([1, 2, 3, 4])
    eventually(lambda: handled == [1], "one token, one message")
    bus.queue("slow").send_batch([1, 2, 3, 4])
    assert begun.wait(30)
    worker.stop()
    eventually(
        lambda: (
            [s for _, s, _ in messages(bus, q)] == ["ready"] * 3
            and sorted(s for _, s, _ in messages(bus, "slow")) == ["in_flight"] + ["ready"] * 3
        ),
        "given back at once",
    )
    assert {a for name in (q, "slow") for _, s, a in messages(bus, name) if s == "ready"} == {0}
    go.set()
    running.join(15)
    assert len(messages(bus, "slow")) == 3


def test_lines_are_given_back(worker: Worker, bus: Bus, start: Start) -> None:
    """Messages that wait behind one of their key, or for their handler."""
    events = bus.stream("s", create=True, lanes=1)
    begun, go = threading.Event(), threading.Event()

    def handle(m: Message[Any]) -> None:
        begun.set()
        assert go.wait(30)

    async def other(m: Message[Any]) -> None: ...

    worker.stream("s", group="g", ordering="key", start="earliest", type="a")(handle)
    worker.stream("s", group="g", type="b", concurrency=3)(other)
    running = start(worker)
    events.publish_batch(list(range(6)), key=["k", "k", "l", "m", None, None], type="a")
    assert begun.wait(30)
    worker.stop()
    flight = "select in_flight, waiting from postbus.list_groups()"
    eventually(lambda: bus.fetch(flight, ()) == [(1, 5)], "given back at once")
    go.set()
    running.join()


def test_stop_before_the_database_is_there(start: Start) -> None:
    worker = Worker("host=127.0.0.1 port=1 connect_timeout=2", maintain=False)

    @worker.queue("q")
    async def handle(m: Message[Any]) -> None: ...

    running = start(worker, wait=False)
    eventually(lambda: worker._stop is not None, "it tries")
    assert running.stop() < 10


@pytest.mark.direct("PgBouncer keeps its sessions open")
def test_database_that_is_away_at_the_start(db: Database, bus: Bus, server_dsn: str, start: Start) -> None:
    bus.queue("q", create=True).send("x")
    done = threading.Event()
    worker = Worker(db.dsn, maintain=False)

    @worker.queue("q")
    async def handle(m: Message[Any]) -> None:
        done.set()

    with psycopg.connect(server_dsn, autocommit=True) as conn:
        allow = sql.SQL("alter database {} allow_connections {}")
        conn.execute(allow.format(sql.Identifier(db.name), sql.SQL("false")))
        running = start(worker, wait=False)
        assert not done.wait(0.5)
        running.check()
        conn.execute(allow.format(sql.Identifier(db.name), sql.SQL("true")))
    assert done.wait(30)


def test_cancelled(db: Database, bus: Bus, q: str) -> None:
    """Whoever cancels `run` does not want to wait."""
    worker = Worker(db.dsn, maintain=False, grace=600)

    async def main() -> float:
        begun = asyncio.Event()

        @worker.queue(q, prefetch=4)
        async def handle(m: Message[Any]) -> None:
            begun.set()
            await asyncio.sleep(600)

        task = asyncio.create_task(worker.run())
        await begun.wait()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    bus.queue(q).send_batch([1, 2, 3])
    assert asyncio.run(main()) < 10
    assert sorted((s, a) for _, s, a in messages(bus, q)) == [("ready", 0), ("ready", 0), ("ready", 1)]


def test_run_again(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    handled: list[Any] = []

    @worker.queue(q)
    async def handle(m: Message[Any]) -> None:
        handled.append(m.payload)

    for n in range(2):
        running = start(worker)
        bus.queue(q).send(n)
        eventually(lambda: handled and handled[-1] == n, "handled")  # noqa: B023 - called at once
        with pytest.raises(BadArgument, match="running already"):
            asyncio.run(worker.run())
        running.stop()


def test_nothing_is_left_behind(worker: Worker, bus: Bus, start: Start, q: str, db: Database) -> None:
    """Neither threads nor connections."""

    @worker.queue(q, transactional=True)
    def handle(m: Message[Any], conn: Any) -> None: ...

    @worker.queue("other", create=True, transactional=True)
    async def on_loop(m: Message[Any], conn: Any) -> None: ...

    before = set(threading.enumerate())
    running: Running = start(worker)
    bus.queue(q).send(1)
    bus.queue("other").send(1)
    eventually(lambda: sum(s.attempts.handled for s in worker.subscriptions) == 2, "handled")
    running.stop()
    eventually(lambda: set(threading.enumerate()) <= before, "no threads")
    count = "select count(*) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"
    conn = db.connect()
    ours = len(bus.pool.get_stats()) and bus.pool.get_stats()["pool_size"]
    eventually(
        lambda: conn.execute(count, (db.name,)).fetchone()[0] <= ours + 1,  # type: ignore[index]
        "no connections but those of the test",
    )
