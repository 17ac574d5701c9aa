"""What stands around handlers."""

from __future__ import annotations

import contextvars
import logging
from typing import Any

import pytest

from postbus import BadArgument, Bus, Message, Worker
from tests.conftest import Database
from tests.worker.conftest import Start, dead, empty, messages
from tests.worker.waiting import eventually

current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="nothing")


@pytest.fixture
def q(bus: Bus) -> str:
    bus.queue("q", create=True, backoff=0)
    return "q"


def test_the_first_one_is_the_outermost(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    steps: list[str] = []

    @worker.use
    async def outer(m: Message[Any], call_next: Any) -> None:
        steps.append(f"outer {m.payload}")
        await call_next(m)
        steps.append("outer end")

    @worker.use
    async def inner(m: Message[Any], call_next: Any) -> None:
        steps.append("inner")
        await call_next(m)
        steps.append("inner end")

    @worker.queue(q)
    def handle(m: Message[Any]) -> None:
        steps.append("handler")

    start(worker)
    bus.queue(q).send("x")
    eventually(empty(bus, q), "done")
    assert steps == ["outer x", "inner", "handler", "inner end", "outer end"]


def test_context_reaches_threads(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    seen: list[str] = []

    @worker.use
    async def tell(m: Message[Any], call_next: Any) -> None:
        current.set(f"message {m.payload}")
        await call_next(m)

    @worker.queue(q)
    def handle(m: Message[Any]) -> None:
        seen.append(current.get())

    start(worker)
    bus.queue(q).send(1)
    eventually(lambda: seen == ["message 1"], "seen")


def test_what_it_raises_is_the_handlers_failure(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    called: list[Any] = []

    @worker.use
    async def refuse(m: Message[Any], call_next: Any) -> None:
        raise PermissionError("not today")

    @worker.queue(q, max_attempts=2)
    async def handle(m: Message[Any]) -> None:
        called.append(m)

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q) == [(2, "PermissionError: not today")], "failed")
    assert called == []


@pytest.mark.parametrize("transactional", [False, True])
def test_it_may_leave_the_handler_out(
    worker: Worker, bus: Bus, start: Start, q: str, transactional: bool
) -> None:
    """Then the message is done; also where the handler would have acked it in its transaction."""
    called: list[Any] = []

    @worker.use
    async def only_good(m: Message[Any], call_next: Any) -> None:
        if m.payload == "good":
            await call_next(m)

    def handle(m: Message[Any], conn: Any = None) -> None:
        called.append(m.payload)

    worker.queue(q, transactional=transactional)(handle)
    start(worker)
    bus.queue(q).send_batch(["bad", "good"])
    eventually(empty(bus, q), "both are done")
    assert called == ["good"]


def test_it_may_try_again(worker: Worker, bus: Bus, start: Start, q: str, db: Database) -> None:
    db.connect().execute("create table effect (n int)")

    @worker.use
    async def twice(m: Message[Any], call_next: Any) -> None:
        try:
            await call_next(m)
        except ValueError:
            await call_next(m)

    tries: list[int] = []

    @worker.queue(q, transactional=True)
    def handle(m: Message[Any], conn: Any) -> None:
        conn.execute("insert into effect values (1)")
        tries.append(m.attempt)
        if len(tries) == 1:
            raise ValueError

    start(worker)
    bus.queue(q).send("x")
    eventually(empty(bus, q), "done")
    assert tries == [1, 1]
    assert db.connect().execute("select count(*) from effect").fetchone() == (1,)


def test_it_fails_after_the_transaction(
    worker: Worker, bus: Bus, start: Start, q: str, db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    db.connect().execute("create table effect (n int)")

    @worker.use
    async def clumsy(m: Message[Any], call_next: Any) -> None:
        await call_next(m)
        raise OSError("the log is full")

    @worker.queue(q, transactional=True)
    async def handle(m: Message[Any], conn: Any) -> None:
        await conn.execute("insert into effect values (1)")

    start(worker)
    with caplog.at_level(logging.WARNING, "postbus"):
        bus.queue(q).send("x")
        eventually(lambda: worker.subscriptions[0].attempts.failed == 1, "failed")
    assert "is done all the same" in caplog.text
    assert "came too late" not in caplog.text
    assert messages(bus, q) == []
    assert db.connect().execute("select count(*) from effect").fetchone() == (1,)


def test_plain_functions_are_refused(worker: Worker) -> None:
    def wrong(m: Message[Any], call_next: Any) -> None: ...

    with pytest.raises(BadArgument, match="is not a coroutine function"):
        worker.use(wrong)  # type: ignore[arg-type]
