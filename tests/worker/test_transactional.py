"""Handlers whose effect and ack commit together."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from postbus import Bus, Message, Worker
from postbus.worker import GiveUp
from tests.conftest import Database
from tests.worker.conftest import Start, dead, empty, messages
from tests.worker.waiting import eventually

Register = Callable[..., None]


@pytest.fixture
def effects(db: Database) -> Callable[[], list[Any]]:
    conn = db.connect()
    conn.execute("create table effect (n int)")
    return lambda: [n for (n,) in conn.execute("select n from effect order by n")]


@pytest.fixture(params=["on the loop", "in a thread"])
def register(request: pytest.FixtureRequest) -> Register:
    """Registers a handler that writes its payload into a table and then does something else."""

    def make(
        worker: Worker, then: Callable[[Message[Any], Any], Any] = lambda m, conn: None, **options: Any
    ) -> None:
        insert = "insert into effect values (%s)"
        if request.param == "on the loop":

            @worker.queue("q", transactional=True, **options)
            async def handle(m: Message[Any], conn: Any) -> None:
                await conn.execute(insert, (m.payload,))
                await asyncio.get_running_loop().run_in_executor(None, then, m, conn)

        else:

            @worker.queue("q", transactional=True, **options)
            def handle_in_thread(m: Message[Any], conn: Any) -> None:
                conn.execute(insert, (m.payload,))
                then(m, conn)

    return make


@pytest.fixture
def q(bus: Bus) -> str:
    bus.queue("q", create=True, backoff=0)
    return "q"


def steal(db: Database, name: str = "q") -> None:
    """Take everything, as if its leases had ended."""
    thief = db.connect()
    thief.execute("set postbus.fake_now = '2100-01-01'")
    assert thief.execute("select count(*) from postbus.receive(%s, max => 100)", (name,)).fetchone() != (0,)


def test_effect_and_ack(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any, register: Register
) -> None:
    register(worker, concurrency=4)
    start(worker)
    bus.queue(q).send_batch(list(range(50)))
    eventually(empty(bus, q), "acked")
    assert effects() == list(range(50))
    assert worker.subscriptions[0].attempts.handled == 50
    assert worker.subscriptions[0].attempts.committed == set(), "nothing is remembered for ever"


def test_failure_leaves_no_effect(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any, register: Register
) -> None:
    def fail(m: Message[Any], conn: Any) -> None:
        if m.attempt < 3:
            raise ValueError("not yet")
        if m.payload == 2:
            raise GiveUp("never")

    register(worker, fail)
    start(worker)
    bus.queue(q).send_batch([1, 2, 3])
    eventually(empty(bus, q), "finished")
    assert effects() == [1, 3]
    assert dead(bus, q) == [(3, "never")]


def test_lost_lease_rolls_back(
    worker: Worker,
    bus: Bus,
    start: Start,
    q: str,
    effects: Any,
    register: Register,
    db: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stolen = threading.Event()

    def lose(m: Message[Any], conn: Any) -> None:
        if m.payload == 1:
            steal(db)
            stolen.set()

    register(worker, lose, lease=60)
    start(worker)
    with caplog.at_level(logging.WARNING, "postbus"):
        bus.queue(q).send(1)
        eventually(lambda: worker.subscriptions[0].attempts.failed == 1, "too late")
    assert stolen.is_set()
    assert effects() == []
    assert messages(bus, q) == [("1", "in_flight", 2)], "it is the other one's"
    assert "was handled too late, and rolled back" in caplog.text
    bus.queue(q).send(2)
    eventually(lambda: effects() == [2], "it goes on")


def test_swallowed_errors_of_the_database_are_failures(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any
) -> None:
    @worker.queue(q, transactional=True, max_attempts=1)
    def handle(m: Message[Any], conn: Any) -> None:
        conn.execute("insert into effect values (1)")
        with suppress(psycopg.Error):
            conn.execute("select 1 / 0")
        # And on it goes, in a transaction that can only be rolled back.

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "failed")
    assert "InFailedSqlTransaction" in dead(bus, q)[0][1]
    assert effects() == []


def test_what_a_handler_sets_stays_with_handlers(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any
) -> None:
    kinds: list[Any] = []

    @worker.queue(q, transactional=True)
    async def handle(m: Message[Any], conn: Any) -> None:
        cursor = await conn.execute("select 1 as one")
        kinds.append(await cursor.fetchone())
        conn.row_factory = dict_row
        await conn.execute("set search_path = nowhere")

    start(worker)
    for _ in range(3):
        bus.queue(q).send("x")
        eventually(empty(bus, q), "acked")
    assert kinds == [(1,)] * 3


def test_connection_that_dies(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any, register: Register, db: Database
) -> None:
    def die(m: Message[Any], conn: Any) -> None:
        if m.attempt == 1:
            db.connect().execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))

    register(worker, die)
    start(worker)
    bus.queue(q).send_batch([1, 2])
    eventually(empty(bus, q), "done in the second attempt")
    assert effects() == [1, 2]


def test_timeout_stops_the_statement(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any, db: Database
) -> None:
    @worker.queue(q, transactional=True, timeout=0.2, max_attempts=1)
    def handle(m: Message[Any], conn: Any) -> None:
        conn.execute("insert into effect values (1)")
        conn.execute("select pg_sleep(600)")

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "given up")
    assert "not done after 0.2 seconds" in dead(bus, q)[0][1]
    eventually(lambda: worker.calls.threads.busy == 0, "the thread is free")
    assert effects() == []


def test_thread_that_goes_on_after_its_timeout_has_no_effect(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any
) -> None:
    go = threading.Event()

    @worker.queue(q, transactional=True, timeout=0.2, max_attempts=1)
    def handle(m: Message[Any], conn: Any) -> None:
        conn.execute("insert into effect values (1)")
        assert go.wait(30)

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "given up")
    go.set()
    eventually(lambda: worker.calls.threads.busy == 0, "the thread ends")
    assert effects() == []


def test_waits_for_a_connection(
    worker: Worker, bus: Bus, start: Start, q: str, effects: Any, register: Register
) -> None:
    """One connection for two handlers that hang: the third gets one all the same."""
    hang = threading.Event()

    def wait(m: Message[Any], conn: Any) -> None:
        if m.payload < 2:
            assert hang.wait(30)

    register(worker, wait, concurrency=3)
    start(worker)
    bus.queue(q).send_batch([0, 1, 2])
    eventually(lambda: effects() == [2], "others go on")
    hang.set()
    eventually(lambda: effects() == [0, 1, 2], "all done")


def test_message_has_no_verbs(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    @worker.queue(q, transactional=True, max_attempts=1)
    async def handle(m: Any, conn: Any) -> None:
        await m.ack(conn=conn)

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "failed")
    assert "no attribute 'ack'" in dead(bus, q)[0][1]


def test_sending_in_the_transaction(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    bus.queue("next", create=True)

    @worker.queue(q, transactional=True, max_attempts=2)
    async def handle(m: Message[Any], conn: Any) -> None:
        await (await worker.bus.queue("next")).send(m.payload, conn=conn)
        if m.attempt == 1:
            raise ValueError

    start(worker)
    bus.queue(q).send_batch([1, 2, 3])
    eventually(empty(bus, q), "done")
    assert sorted(p for p, _, _ in messages(bus, "next")) == ["1", "2", "3"]


def test_stream(worker: Worker, bus: Bus, start: Start, effects: Any, db: Database) -> None:
    events = bus.stream("s", create=True, lanes=4)

    @worker.stream("s", group="g", ordering="key", start="earliest", transactional=True, concurrency=4)
    def handle(m: Message[Any], conn: Any) -> None:
        conn.execute("insert into effect values (%s)", (m.payload,))
        if m.attempt == 1 and m.payload % 10 == 0:
            raise ValueError

    start(worker)
    events.publish_batch(list(range(100)), key=[str(n % 7) for n in range(100)])
    eventually(lambda: len(effects()) == 100, "all done")
    assert effects() == list(range(100))
    rows = "select pending + in_flight + waiting from postbus.list_groups()"
    eventually(lambda: bus.fetch(rows, ()) == [(0,)], "and acked")


def test_lost_lease_of_a_stream_stops_what_is_behind(
    worker: Worker, bus: Bus, start: Start, effects: Any, db: Database
) -> None:
    events = bus.stream("s", create=True, lanes=1)
    begun: list[Any] = []

    @worker.stream("s", group="g", ordering="key", start="earliest", transactional=True, lease=60)
    def handle(m: Message[Any], conn: Any) -> None:
        begun.append(m.payload)
        conn.execute("insert into effect values (%s)", (m.payload,))
        if m.payload == 1:
            thief = db.connect()
            thief.execute("set postbus.fake_now = '2100-01-01'")
            assert thief.execute("select count(*) from postbus.consume('s', 'g')").fetchone() == (3,)

    start(worker)
    events.publish_batch([1, 2, 3], key="k")
    eventually(lambda: worker.subscriptions[0].attempts.failed == 1, "too late")
    time.sleep(0.1)  # for what must not happen
    assert begun == [1]
    assert effects() == []
