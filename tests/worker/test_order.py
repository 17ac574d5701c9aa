"""Groups with an order: what comes later waits for what came before it, also when that fails."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from typing import Any

import pytest

from postbus import Bus, Message, Worker
from postbus.worker import Backoff, GiveUp
from tests.worker.conftest import Start, dead
from tests.worker.waiting import eventually


def through(bus: Bus) -> bool:
    """Whether all groups have nothing left to do."""
    rows = bus.fetch("select pending + in_flight + waiting from postbus.list_groups()", ())
    return bool(rows) and all(row == (0,) for row in rows)


class Diary:
    """What handlers did, in order: (key, number, attempt, what)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str | None, Any, int, str]] = []
        self._lock = threading.Lock()

    def note(self, m: Message[Any], what: str) -> None:
        with self._lock:
            self.lines.append((m.key, m.payload, m.attempt, what))

    def finished(self, count: int) -> bool:
        """Whether so many messages are done or given up."""
        with self._lock:
            return sum(what in ("done", "give up") for *_, what in self.lines) >= count

    def check(self, expected: dict[str, list[Any]]) -> None:
        """Each key: one at a time, in order, each until it is done."""
        found: dict[str, list[tuple[Any, str]]] = defaultdict(list)
        for key, number, _, what in self.lines:
            found[str(key)].append((number, what))
        assert set(found) == set(expected)
        for key, lines in found.items():
            at_work: Any = None
            todo = list(expected[key])
            for number, what in lines:
                if what == "begin":
                    assert at_work is None, f"{key}: {number} began beside {at_work}"
                    assert number == todo[0], f"{key}: {number} began before {todo[0]}"
                    at_work = number
                else:
                    assert number == at_work
                    at_work = None
                    if what != "fail":
                        todo.pop(0)
            assert todo == [], f"{key}: not done: {todo}"


@pytest.mark.parametrize("kind", ["loop", "thread", "transactional"])
@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_order_survives_random_failures(
    worker: Worker, bus: Bus, start: Start, ordering: str, kind: str
) -> None:
    rnd = random.Random(f"{ordering}/{kind}")
    keys = [f"k{n}" for n in range(6)] if ordering == "key" else ["the only one"]
    events = bus.stream("s", create=True, lanes=3)
    bus.fetch("select postbus.create_group('s', 'g', %s::jsonb)", (f'{{"ordering": "{ordering}"}}',))
    diary = Diary()
    # Decided beforehand: which number of which key fails how often, and which is given up.
    numbers = list(range(30 if ordering == "key" else 12))
    fails = {(key, n): rnd.choice([0, 0, 0, 1, 2]) for key in keys for n in numbers}
    hopeless = {(key, n) for key in keys for n in numbers if rnd.random() < 0.03}

    def decide(m: Message[Any]) -> None:
        where = (str(m.key), m.payload)
        if m.attempt <= fails[where]:
            diary.note(m, "fail")
            raise ValueError("not this time")
        if where in hopeless:
            diary.note(m, "give up")
            raise GiveUp("never")
        diary.note(m, "done")

    backoff = Backoff(first=0.01, factor=1)
    if kind == "loop":

        @worker.stream("s", group="g", concurrency=8, prefetch=40, backoff=backoff)
        async def handle(m: Message[Any]) -> None:
            diary.note(m, "begin")
            await asyncio.sleep(rnd.random() * 0.003)
            decide(m)

    elif kind == "thread":

        @worker.stream("s", group="g", concurrency=8, prefetch=40, backoff=backoff)
        def handle_in_thread(m: Message[Any]) -> None:
            diary.note(m, "begin")
            time.sleep(rnd.random() * 0.003)
            decide(m)

    else:

        @worker.stream("s", group="g", concurrency=8, prefetch=40, backoff=backoff, transactional=True)
        async def handle_with(m: Message[Any], conn: Any) -> None:
            diary.note(m, "begin")
            decide(m)

    start(worker)
    for n in numbers:
        for key in keys:
            events.publish(n, key=key)
    eventually(lambda: diary.finished(len(numbers) * len(keys)), "everything is done", within=60)
    diary.check(dict.fromkeys(keys, numbers))
    eventually(lambda: through(bus), "and told")
    assert len(dead(bus, "s")) == len(hopeless)


def test_keys_do_not_wait_for_each_other(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True, lanes=1)
    blocked, go = threading.Event(), threading.Event()
    done: list[str] = []

    @worker.stream("s", group="g", ordering="key", concurrency=2, start="earliest")
    def handle(m: Message[Any]) -> None:
        if m.payload == "slow":
            blocked.set()
            assert go.wait(30)
        done.append(m.payload)

    start(worker)
    events.publish_batch(["slow", "behind it", "a", "b"], key=["x", "x", "y", "z"])
    assert blocked.wait(30)
    eventually(lambda: sorted(done) == ["a", "b"], "other keys of the same batch go on")
    go.set()
    eventually(lambda: sorted(done[2:]) == ["behind it", "slow"], "then the rest")
    assert done[2:] == ["slow", "behind it"]


def test_what_is_behind_a_failure_does_not_use_up_attempts(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True, lanes=1)
    attempts: dict[str, list[int]] = defaultdict(list)

    @worker.stream("s", group="g", ordering="key", start="earliest", backoff=Backoff(first=0.01, factor=1))
    async def handle(m: Message[Any]) -> None:
        attempts[m.payload].append(m.attempt)
        if m.payload == "first" and m.attempt < 4:
            raise ValueError

    start(worker)
    events.publish_batch(["first", "second", "third"], key="k")
    eventually(lambda: "third" in attempts, "done")
    assert attempts == {"first": [1, 2, 3, 4], "second": [1], "third": [1]}


def test_nack_by_the_handler_itself(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True, lanes=1)
    done: list[tuple[str, int]] = []

    @worker.stream("s", group="g", ordering="key", start="earliest")
    async def handle(m: Any) -> None:
        done.append((m.payload, m.attempt))
        if m.payload == "first" and m.attempt == 1:
            await m.nack(delay=0.05)

    start(worker)
    events.publish_batch(["first", "second"], key="k")
    eventually(lambda: len(done) >= 3, "done")
    assert done == [("first", 1), ("first", 2), ("second", 1)]


def test_handlers_of_a_group_keep_the_order_between_them(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True, lanes=2)
    diary = Diary()

    @worker.stream("s", group="g", ordering="key", start="earliest", type="a", concurrency=1)
    async def a(m: Message[Any]) -> None:
        diary.note(m, "begin")
        await asyncio.sleep(0.001)
        diary.note(m, "done")

    @worker.stream("s", group="g", type="b", concurrency=3, backoff=Backoff(first=0.01))
    def b(m: Message[Any]) -> None:
        diary.note(m, "begin")
        if m.attempt == 1 and m.payload % 5 == 0:
            diary.note(m, "fail")
            raise ValueError
        diary.note(m, "done")

    start(worker)
    rnd = random.Random(1)
    for n in range(60):
        events.publish_batch([n] * 4, key=["1", "2", "3", "4"], type=[rnd.choice("ab") for _ in range(4)])
    eventually(lambda: diary.finished(240), "done")
    diary.check({key: list(range(60)) for key in "1234"})


def test_each_handler_of_a_group_has_a_concurrency_of_its_own(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True)
    now: dict[str, int] = {"a": 0, "b": 0}
    most: dict[str, int] = {"a": 0, "b": 0}

    async def work(m: Message[Any]) -> None:
        now[m.type] += 1
        most[m.type] = max(most[m.type], now[m.type])
        await asyncio.sleep(0.002)
        now[m.type] -= 1

    worker.stream("s", group="g", ordering="none", start="earliest", type="a", concurrency=1)(work)
    worker.stream("s", group="g", type="b", concurrency=4)(work)
    events.publish_batch(list(range(200)), type=["a", "b"] * 100)
    bus.fetch('select postbus.create_group(\'s\', \'g\', \'{"ordering": "none", "start": "earliest"}\')', ())
    start(worker)
    eventually(lambda: worker.subscriptions[0].attempts.handled == 200, "done")
    assert most == {"a": 1, "b": 4}


def test_two_workers_share_a_group_in_order(worker: Worker, bus: Bus, start: Start) -> None:
    events = bus.stream("s", create=True, lanes=8)
    bus.fetch("select postbus.create_group('s', 'g', '{\"ordering\": \"key\"}')", ())
    diary = Diary()
    names: set[str] = set()

    def equip(made: Worker) -> Worker:
        @made.stream("s", group="g", concurrency=4, prefetch=8, backoff=Backoff(first=0.01))
        async def handle(m: Message[Any]) -> None:
            names.add(made.name)
            diary.note(m, "begin")
            await asyncio.sleep(0.001)
            if m.attempt == 1 and m.payload % 7 == 0:
                diary.note(m, "fail")
                raise ValueError
            diary.note(m, "done")

        return made

    start(equip(worker))
    start(equip(Worker(worker.dsn, name="another", maintain=False)))
    keys = [str(k) for k in range(20)]
    for n in range(20):
        events.publish_batch([n] * len(keys), key=keys)
    eventually(lambda: diary.finished(400), "done")
    diary.check({key: list(range(20)) for key in keys})
    assert names == {"worker", "another"}


def test_queue_with_one_at_a_time_per_key(worker: Worker, bus: Bus, start: Start) -> None:
    jobs = bus.queue("q", create=True, max_attempts=20)
    jobs.set_key_policy(concurrency=1)
    diary = Diary()

    @worker.queue("q", concurrency=6, prefetch=12, backoff=Backoff(first=0.01, factor=1))
    async def handle(m: Message[Any]) -> None:
        diary.note(m, "begin")
        await asyncio.sleep(0.001)
        if m.attempt == 1 and m.payload % 4 == 0:
            diary.note(m, "fail")
            raise ValueError
        diary.note(m, "done")

    start(worker)
    keys = [str(k) for k in range(5)]
    for n in range(12):
        jobs.send_batch([n] * len(keys), key=keys)
    eventually(lambda: worker.subscriptions[0].attempts.handled == 60, "done")
    diary.check({key: list(range(12)) for key in keys})
