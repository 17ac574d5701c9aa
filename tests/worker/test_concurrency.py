"""How many handlers run at a time, how fast, and who comes first."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from postbus import BadArgument, Bus, Message, Worker
from tests.conftest import Database
from tests.worker.conftest import Start, empty
from tests.worker.waiting import eventually


class Gauge:
    """How many are inside at a time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self.now -= 1


@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_concurrency_of_a_handler(worker: Worker, bus: Bus, start: Start, kind: str) -> None:
    jobs = bus.queue("q", create=True)
    inside = Gauge()

    if kind == "loop":

        @worker.queue("q", concurrency=4, prefetch=40)
        async def handle(m: Message[Any]) -> None:
            with inside:
                await asyncio.sleep(0.002)

    else:

        @worker.queue("q", concurrency=4, prefetch=40)
        def handle_in_thread(m: Message[Any]) -> None:
            with inside:
                time.sleep(0.002)

    jobs.send_batch(list(range(100)))
    start(worker)
    eventually(empty(bus, "q"), "done")
    assert inside.most == 4


def test_in_flight_is_bounded_by_prefetch(worker: Worker, bus: Bus, start: Start) -> None:
    jobs = bus.queue("q", create=True)
    go = threading.Event()

    @worker.queue("q", concurrency=2, prefetch=6)
    def handle(m: Message[Any]) -> None:
        assert go.wait(30)

    jobs.send_batch(list(range(100)))
    start(worker)
    flight = "select in_flight from postbus.list_queues()"
    eventually(lambda: bus.fetch(flight, ()) == [(6,)], "six are taken")
    time.sleep(0.2)  # for what must not happen
    assert bus.fetch(flight, ()) == [(6,)]
    go.set()
    eventually(empty(bus, "q"), "done")


def test_rate_of_a_handler(worker: Worker, bus: Bus, start: Start) -> None:
    jobs = bus.queue("q", create=True)
    times: list[float] = []

    @worker.queue("q", rate=100, burst=5, concurrency=10, prefetch=50)
    async def handle(m: Message[Any]) -> None:
        times.append(time.monotonic())

    jobs.send_batch(list(range(40)))
    start(worker)
    eventually(empty(bus, "q"), "done")
    # 0.35 by their tokens, but on a busy machine the first handler begins later than its token.
    assert times[-1] - times[0] > 0.25, "five at once, then a hundred a second"


def test_concurrency_of_the_worker(db: Database, bus: Bus, start: Start) -> None:
    worker = Worker(db.dsn, maintain=False, concurrency=3)
    inside = Gauge()

    async def handle(m: Message[Any]) -> None:
        with inside:
            await asyncio.sleep(0.002)

    def handle_in_thread(m: Message[Any]) -> None:
        with inside:
            time.sleep(0.002)

    for name, function in (("a", handle), ("b", handle_in_thread)):
        bus.queue(name, create=True).send_batch(list(range(40)))
        worker.queue(name, concurrency=5, prefetch=20)(function)
    start(worker)
    for name in ("a", "b"):
        eventually(empty(bus, name), "done")
    assert inside.most == 3


@pytest.mark.parametrize("priority", ["strict", "weighted"])
def test_priority(db: Database, bus: Bus, start: Start, priority: Any) -> None:
    worker = Worker(db.dsn, maintain=False, concurrency=1, priority=priority)
    order: list[str] = []
    full = threading.Event()
    go = asyncio.Event()

    async def handle(m: Message[Any]) -> None:
        if m.payload == "first of all":
            full.set()
            await go.wait()
            return
        order.append(m.source)
        await asyncio.sleep(0)

    async def open_the_door(m: Message[Any]) -> None: ...

    bus.queue("door", create=True).send("first of all")
    worker.queue("door")(handle)
    for name, weight in (("high", 3), ("low", 1)):
        bus.queue(name, create=True)
        worker.queue(name, concurrency=2, prefetch=400, weight=weight)(handle)
    running = start(worker)
    assert full.wait(30)
    for name in ("low", "high"):
        bus.queue(name).send_batch(list(range(100)))
    eventually(
        lambda: bus.fetch("select sum(in_flight)::int from postbus.list_queues()", ()) == [(201,)],
        "everything is in hand",
    )
    assert worker._loop is not None
    worker._loop.call_soon_threadsafe(go.set)
    eventually(lambda: len(order) == 200, "all done")
    running.check()
    first = order[:100]
    if priority == "strict":
        assert first.count("high") > 90
    else:
        assert 60 <= first.count("high") <= 90, "three turns to one"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"priority": "high"}, "priority is"),
        ({"grace": -1}, "grace must be"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        Worker(**options)
