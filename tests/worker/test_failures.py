"""Handlers that fail, in every way there is."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

import pytest

from postbus import Bus, Message, Worker
from postbus.worker import Backoff, GiveUp, Retry
from tests.worker.conftest import Start, dead, empty, messages
from tests.worker.waiting import eventually


@pytest.fixture
def q(bus: Bus) -> str:
    bus.queue("q", create=True, backoff=0, max_attempts=20)
    return "q"


async def raises(m: Message[Any]) -> None:
    raise ValueError(f"bad \0 luck \ud800 {m.payload}")


def test_comes_again_and_in_the_end_is_given_up(
    worker: Worker, bus: Bus, start: Start, q: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker.queue(q, max_attempts=3)(raises)
    start(worker)
    with caplog.at_level(logging.WARNING, "postbus"):
        bus.queue(q).send("x")
        eventually(empty(bus, q), "given up")
    assert dead(bus, q) == [(3, "ValueError: bad \\0 luck \\ud800 x")]
    lines = [r.getMessage() for r in caplog.records]
    assert [line.split(", ")[2].split(":")[0] for line in lines] == [
        "comes again",
        "comes again",
        "goes to the dead letters",
    ]
    assert all(r.exc_info is None for r in caplog.records if r.levelno >= logging.WARNING), "no tracebacks"
    assert worker.subscriptions[0].attempts.failed == 3


def test_traceback_is_there_for_the_asking(
    worker: Worker, bus: Bus, start: Start, q: str, caplog: pytest.LogCaptureFixture
) -> None:
    @worker.queue(q, max_attempts=1)
    async def handle(m: Message[Any]) -> None:
        raise ValueError("bad luck")

    start(worker)
    with caplog.at_level(logging.DEBUG, "postbus"):
        bus.queue(q).send("x")
        eventually(empty(bus, q), "given up")
    [record] = [r for r in caplog.records if r.exc_info]
    assert record.levelno == logging.DEBUG
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


@pytest.mark.parametrize("kind", ["async", "thread", "process", "transactional"])
def test_give_up_and_retry(worker: Worker, bus: Bus, start: Start, q: str, kind: str) -> None:
    functions: dict[str, Any] = {"async": decides_async, "transactional": decides_with}
    worker.queue(q, process=kind == "process", transactional=kind == "transactional")(
        functions.get(kind, decides)
    )
    start(worker)
    bus.queue(q).send("give up")
    eventually(lambda: dead(bus, q) == [(1, "there is no such customer")], "given up")
    bus.queue(q).send("retry")
    eventually(empty(bus, q), "retried, with what the first attempt left")
    assert len(dead(bus, q)) == 1


def decides(m: Message[Any]) -> None:
    if m.payload == "give up":
        raise GiveUp("there is no such customer")
    if m.attempt == 1:
        raise Retry("not yet", delay=0, state={"page": 7})
    assert (m.attempt, m.state) == (2, {"page": 7})


async def decides_async(m: Message[Any]) -> None:
    decides(m)


def decides_with(m: Message[Any], conn: Any) -> None:
    decides(m)


def test_retry_after_a_delay_of_its_own(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    @worker.queue(q, backoff=Backoff(first=100))
    async def handle(m: Message[Any]) -> None:
        raise Retry("the bank is closed", delay=3600)

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: [s for _, s, _ in messages(bus, q)] == ["delayed"], "waits")
    [(wait, reason)] = bus.fetch(
        "select extract(epoch from due - now())::float8, reason from postbus.peek('q')", ()
    )
    assert 3500 < wait <= 3600
    assert reason == "the bank is closed"


def test_backoff_of_the_handler(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    @worker.queue(q, backoff=Backoff(first=50, jitter=0.2))
    async def handle(m: Message[Any]) -> None:
        raise ValueError

    start(worker)
    bus.queue(q).send_batch(list(range(20)))
    eventually(lambda: {s for _, s, _ in messages(bus, q)} == {"delayed"}, "all wait")
    rows = bus.fetch("select extract(epoch from due - now())::float8 from postbus.peek('q', max => 20)", ())
    waits = [wait for (wait,) in rows]
    assert all(35 < wait <= 60 for wait in waits)
    assert max(waits) - min(waits) > 1, "they do not come back together"


@pytest.mark.parametrize("delay", [-1, float("inf"), float("nan")])
def test_a_delay_that_is_none(worker: Worker, bus: Bus, start: Start, q: str, delay: float) -> None:
    @worker.queue(q, max_attempts=1)
    async def handle(m: Message[Any]) -> None:
        raise Retry("later", delay=delay)

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "a failure like any other")
    assert "delay is a number of seconds" in dead(bus, q)[0][1]


def test_a_state_that_cannot_be_kept(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    @worker.queue(q)
    async def handle(m: Message[Any]) -> None:
        if m.attempt == 1:
            raise Retry("again", state=object(), delay=0)

    s = bus.stream("s", create=True)

    @worker.stream("s", group="g", start="earliest")
    async def event(m: Message[Any]) -> None:
        if m.attempt == 1:
            raise Retry("again", state={"a": 1}, delay=0)

    start(worker)
    bus.queue(q).send("x")
    s.publish("y")
    eventually(empty(bus, q), "came again without it")
    eventually(
        lambda: bus.fetch("select pending + in_flight + waiting from postbus.list_groups()", ()) == [(0,)],
        "the event too",
    )
    assert not dead(bus, "s")


def exits(m: Message[Any]) -> None:
    if m.attempt == 1:
        sys.exit(3)


async def exits_async(m: Message[Any]) -> None:
    exits(m)


def stops_iterating(m: Message[Any]) -> None:
    if m.attempt == 1:
        raise StopIteration


def interrupts(m: Message[Any]) -> None:
    if m.attempt == 1:
        raise KeyboardInterrupt


async def cancels_itself(m: Message[Any]) -> None:
    if m.attempt == 1:
        raise asyncio.CancelledError


async def awaits_something_cancelled(m: Message[Any]) -> None:
    if m.attempt == 1:
        other = asyncio.ensure_future(asyncio.sleep(100))
        asyncio.get_running_loop().call_soon(other.cancel)
        await other


def cancels_in_a_thread(m: Message[Any]) -> None:
    if m.attempt == 1:
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    "function",
    [
        exits,
        exits_async,
        stops_iterating,
        interrupts,
        cancels_itself,
        awaits_something_cancelled,
        cancels_in_a_thread,
    ],
)
def test_what_is_more_than_an_exception(
    worker: Worker, bus: Bus, start: Start, q: str, function: Any
) -> None:
    worker.queue(q)(function)
    running = start(worker)
    bus.queue(q).send_batch([1, 2, 3])
    eventually(empty(bus, q), "each comes again, and the worker goes on")
    running.check()
    assert worker.subscriptions[0].attempts.failed == 3
    assert worker.subscriptions[0].attempts.handled == 3


async def _work() -> None: ...


def test_a_coroutine_that_was_never_awaited_is_not_acked(
    worker: Worker, bus: Bus, start: Start, q: str
) -> None:
    @worker.queue(q, max_attempts=1)
    def handle(m: Message[Any]) -> Any:
        return _work()

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "it failed")
    assert "use async def" in dead(bus, q)[0][1]


def test_timeout_of_a_coroutine(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    cancelled = threading.Event()

    @worker.queue(q, timeout=0.05, max_attempts=1)
    async def handle(m: Message[Any]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q) == [(1, "TimeoutError: not done after 0.05 seconds")], "given up")
    assert cancelled.wait(5)


def test_a_timeout_of_the_handlers_own(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    @worker.queue(q, timeout=60, max_attempts=1)
    async def handle(m: Message[Any]) -> None:
        raise TimeoutError("the bank did not answer")

    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q) == [(1, "TimeoutError: the bank did not answer")], "given up")


def test_threads_that_hang_take_no_place_away(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    hang = threading.Event()
    begun: list[Any] = []

    @worker.queue(q, timeout=0.5, max_attempts=1)
    def handle(m: Message[Any]) -> None:
        begun.append(m.payload)
        if m.payload < 3:
            hang.wait(60)

    start(worker)
    try:
        bus.queue(q).send_batch([0, 1, 2, 3, 4])
        eventually(empty(bus, q), "all have had their turn")
        assert begun == [0, 1, 2, 3, 4]
        assert [reason for _, reason in dead(bus, q)] == ["TimeoutError: not done after 0.5 seconds"] * 3
        assert worker.calls.threads.busy == 3
    finally:
        hang.set()
    eventually(lambda: worker.calls.threads.busy == 0, "and come back in the end")
