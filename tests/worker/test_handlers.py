"""Handlers of every kind: what they get, and what becomes of messages when they return."""

from __future__ import annotations

import functools
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from postbus import BadArgument, Bus, Message, Worker
from postbus.serializers import MsgPack
from tests.worker.conftest import Start, dead, empty, messages
from tests.worker.waiting import eventually


@dataclass
class Email:
    to: str


class Letter(BaseModel):
    to: str
    stamps: int = 1


class Seen:
    """What handlers saw, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, what: Any) -> None:
        self._queue.put(what)

    def next(self) -> Any:
        return self._queue.get(timeout=30)

    def nothing(self) -> bool:
        return self._queue.empty()


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_coroutine_on_the_loop(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    emails = bus.queue("emails", create=True)

    @worker.queue("emails")
    async def handle(m: Message[Any]) -> None:
        seen((m.payload, m.key, m.attempt, m.source, threading.current_thread().name))

    start(worker)
    emails.send({"to": "you"}, key="k")
    assert seen.next() == ({"to": "you"}, "k", 1, "emails", "worker-under-test")
    eventually(empty(bus, "emails"), "acked")


def test_plain_function_in_a_thread(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    emails = bus.queue("emails", create=True)
    together = threading.Barrier(3)

    @worker.queue("emails", concurrency=3)
    def handle(m: Message[Any]) -> None:
        together.wait(30)  # three at a time, or never
        seen((threading.current_thread().name, hasattr(m, "ack")))

    start(worker)
    emails.send_batch([1, 2, 3])
    assert [seen.next() for _ in range(3)] == [("postbus-handler", False)] * 3
    eventually(empty(bus, "emails"), "acked")


def where(m: Message[Any]) -> None:
    """For another process."""
    with Path(m.payload["to"]).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def test_function_in_another_process(worker: Worker, bus: Bus, start: Start, tmp_path: Any) -> None:
    work = bus.queue("work", create=True)
    worker.queue("work", process=True)(where)
    start(worker)
    path = tmp_path / "pids"
    for _ in range(3):
        work.send({"to": str(path)})
    eventually(empty(bus, "work"), "acked")
    pids = path.read_text().split()
    assert len(pids) == 3
    assert len(set(pids)) == 1, "the process is used again"
    assert str(os.getpid()) not in pids


def test_objects_partials_and_methods(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    class Handler:
        async def __call__(self, m: Message[Email]) -> None:
            seen(m.payload)

        def method(self, m: Message[Letter]) -> None:
            seen(m.payload)

    async def two(prefix: str, m: Message[Email]) -> None:
        seen((prefix, m.payload))

    for name in ("a", "b", "c"):
        bus.queue(name, create=True)
    worker.queue("a")(Handler())
    worker.queue("b")(Handler().method)
    worker.queue("c")(functools.partial(two, "c"))
    start(worker)
    bus.queue("a").send({"to": "x"})
    assert seen.next() == Email("x")
    bus.queue("b").send({"to": "y"})
    assert seen.next() == Letter(to="y")
    bus.queue("c").send({"to": "z"})
    assert seen.next() == ("c", Email("z"))


def test_what_does_not_fit_the_model_goes_to_the_dead_letters(
    worker: Worker, bus: Bus, start: Start, seen: Seen
) -> None:
    letters = bus.queue("letters", create=True)

    @worker.queue("letters")
    async def handle(m: Message[Letter]) -> None:
        seen(m.payload.to)

    start(worker)
    letters.send({"stamps": "none"})
    letters.send({"to": "somebody"})
    bus.fetch("select postbus.send('letters', 'this is not JSON'::text)", ())
    assert seen.next() == "somebody"
    eventually(empty(bus, "letters"), "all finished")
    first, second = dead(bus, "letters")
    assert (first[0], second[0]) == (1, 1)
    assert "not readable as application/json" in first[1]
    assert seen.nothing()


def test_annotation_that_cannot_be_read(worker: Worker, bus: Bus, start: Start) -> None:
    class Local:
        pass

    bus.queue("q", create=True)

    @worker.queue("q")
    async def handle(m: Message[Local]) -> None: ...

    with pytest.raises(BadArgument, match=r"(?s)handler .*handle of 'q'.*Local.*top level"):
        start(worker)


def test_serializer_of_a_handler(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    packed = bus.queue("packed", create=True, serializer=MsgPack())

    @worker.queue("packed", serializer=MsgPack())
    async def handle(m: Message[dict[str, bytes]]) -> None:
        seen(m.payload)

    start(worker)
    packed.send({"raw": b"\0\1"})
    assert seen.next() == {"raw": b"\0\1"}


@pytest.mark.parametrize("with_rest", [False, True])
def test_types_of_a_queue(worker: Worker, bus: Bus, start: Start, seen: Seen, with_rest: bool) -> None:
    jobs = bus.queue("jobs", create=True)

    @worker.queue("jobs", type="email")
    async def email(m: Message[Email]) -> None:
        seen(("email", m.payload))

    @worker.queue("jobs", type="letter")
    def letter(m: Message[Letter]) -> None:
        seen(("letter", m.payload))

    if with_rest:

        @worker.queue("jobs")
        async def rest(m: Message[Any]) -> None:
            seen(("rest", m.type, m.payload))

    start(worker)
    jobs.send({"to": "a"}, type="email")
    jobs.send({"to": "b"}, type="letter")
    jobs.send("?", type="other")
    expected: list[Any] = [("email", Email("a")), ("letter", Letter(to="b"))]
    if with_rest:
        expected.append(("rest", "other", "?"))
    found = [seen.next() for _ in expected]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    if with_rest:
        eventually(empty(bus, "jobs"), "all are for somebody")
    else:
        eventually(lambda: messages(bus, "jobs") == [('"?"', "ready", 0)], "nobody takes what is for nobody")


def test_types_of_a_group(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    orders = bus.stream("orders", create=True)

    @worker.stream("orders", group="g", type="created", start="earliest")
    async def created(m: Message[Email]) -> None:
        seen(("created", m.payload, m.group))

    @worker.stream("orders", group="g", type="paid")
    def paid(m: Message[Letter]) -> None:
        seen(("paid", m.payload, m.group))

    start(worker)
    orders.publish({"to": "a"}, type="created")
    bus.fetch("select postbus.publish('orders', 'no JSON, and nobody cares'::text, 'noise')", ())
    orders.publish({"to": "b"}, type="paid")
    found = [seen.next() for _ in range(2)]
    assert sorted(map(str, found)) == sorted(
        map(str, [("created", Email("a"), "g"), ("paid", Letter(to="b"), "g")])
    )
    pending = "select pending + in_flight + waiting + dead_letters from postbus.list_groups()"
    eventually(lambda: bus.fetch(pending, ()) == [(0,)], "the group is through with everything")


def test_the_engine_makes_what_is_missing(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    @worker.queue("new", create=True, max_attempts=7, max_size=100)
    async def handle(m: Message[Any]) -> None:
        seen(m.payload)

    start(worker)
    assert bus.fetch("select max_attempts, max_size from postbus.list_queues()", ()) == [(7, 100)]
    bus.queue("new").send(1)
    assert seen.next() == 1


def test_manual_ack(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    q = bus.queue("q", create=True, backoff=0, lease=1)

    @worker.queue("q", manual_ack=True)
    def handle(m: Message[Any]) -> None:
        if m.payload == "fails" and m.attempt == 1:
            raise ValueError("no")
        if m.payload != "forgets" or m.attempt > 1:
            bus.ack(m)
        seen((m.payload, m.attempt))

    start(worker)
    q.send("good")
    assert seen.next() == ("good", 1)
    q.send("fails")
    assert seen.next() == ("fails", 2)
    q.send("forgets")
    assert seen.next() == ("forgets", 1)
    assert seen.next() == ("forgets", 2), "comes again when its lease ends"
    eventually(empty(bus, "q"), "all finished")


def test_sending_from_a_handler(worker: Worker, bus: Bus, start: Start, seen: Seen) -> None:
    bus.queue("first", create=True)
    bus.queue("second", create=True)

    @worker.queue("first")
    async def pass_on(m: Message[Any]) -> None:
        await (await worker.bus.queue("second")).send(m.payload + 1)

    @worker.queue("second")
    async def last(m: Message[Any]) -> None:
        seen(m.payload)

    start(worker)
    bus.queue("first").send(1)
    assert seen.next() == 2


def test_bus_of_a_worker_that_does_not_run(worker: Worker) -> None:
    with pytest.raises(BadArgument, match="not running"):
        _ = worker.bus
