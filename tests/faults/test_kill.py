"""kill -9 of a worker at every point of the life of a message."""

from __future__ import annotations

import random
import signal
import time

import pytest

from postbus import Bus
from tests.conftest import Database
from tests.faults.app import POINTS
from tests.faults.conftest import LONG, Processes, Producer, effects, prepare, settled, wait_until_done
from tests.faults.record import Record
from tests.worker.waiting import eventually


@pytest.mark.parametrize("kind", ["queues", "streams"])
def test_at_each_point(db: Database, bus: Bus, record: Record, processes: Processes, kind: str) -> None:
    """One process after the other, each with a queue or stream of its own; one that lives does the rest."""
    names = [point.replace(" ", "-") for point in POINTS]
    config = {"concurrency": 3, "prefetch": 6, "name": "mortal"}
    victims: list[int] = []
    for point, name in zip(POINTS, names, strict=True):
        if kind == "queues":
            bus.queue(name, create=True, lease=1)
        else:
            bus.stream(name, create=True, lanes=1).group("g", ordering="key", start="earliest", lease=1)
        send(bus, record, name, [1, 2, 3])
        victim = processes.start(db.dsn, die_at=point, **{kind: [name]}, **config)
        victims.append(victim.pid)
        processes.died(victim)
    survivor = processes.start(db.dsn, **{kind: names}, **config)
    wait_until_done(record, *names)
    eventually(lambda: left(bus, kind) == 0, "all are acked")
    processes.stop(survivor)

    def lines(point: str, what: str) -> list[tuple[bool, int, int]]:
        found = record.of(what, source=point.replace(" ", "-"))
        return [(x.pid in victims, x.number, x.attempt) for x in found]

    first, again = [(False, n, 1) for n in (1, 2, 3)], [(False, n, 2) for n in (1, 2, 3)]
    assert lines("before fetch", "begin") == first
    assert lines("after fetch", "begin") == again, "taken, and taken again when the lease was over"
    assert lines("in the handler", "begin") == [(True, 1, 1), *again]
    assert lines("in the handler", "end") == again
    assert lines("before the ack", "end") == [(True, 1, 1), (True, 2, 1), (True, 3, 1), *again]
    assert lines("after the ack", "end") == [(True, 1, 1), (True, 2, 1), (True, 3, 1)], "and never again"


def left(bus: Bus, kind: str) -> int:
    query = {
        "queues": "select sum(ready + delayed + in_flight)::int from postbus.list_queues()",
        "streams": "select sum(pending + in_flight + waiting)::int from postbus.list_groups()",
    }[kind]
    return int(bus.fetch(query, ())[0][0])


def send(bus: Bus, record: Record, name: str, numbers: list[int]) -> None:
    """Send numbers to the queue or stream of that name, all with one key."""
    if bus.fetch("select from postbus.list_queues() where name = %s", (name,)):
        bus.queue(name).send_batch(numbers, key="k")
    else:
        bus.stream(name).publish_batch(numbers, key="k")
    for number in numbers:
        record.note(name, number, "k", 0, "ok")


@pytest.mark.parametrize("source", ["queues", "streams"])
def test_transactional_handlers_under_kills(
    db: Database, bus: Bus, record: Record, processes: Processes, source: str
) -> None:
    """The effect table equals the messages, exactly."""
    prepare(bus, lease=1)
    rnd = random.Random(source)
    name = {"queues": "jobs", "streams": "events"}[source]
    config = {source: [name], "transactional": True, "concurrency": 3, "prefetch": 6, "work": 0.005}
    kills = 60 if LONG else 4
    with Producer(db.dsn, record, pause=0.005):
        alive = [processes.start(db.dsn, name=f"worker-{n}", **config) for n in range(2)]
        for kill in range(kills):
            victim = alive.pop(0)
            before = record.count("begin")
            eventually(lambda: record.count("begin") > before + 3, "at work")  # noqa: B023 - called at once
            time.sleep(rnd.random() * 0.2)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            # Under the name of the dead.
            alive.append(processes.start(db.dsn, name=f"worker-{kill % 2}", **config))
    wait_until_done(record, name)
    eventually(lambda: len(effects(bus, name)) >= len(record.sent(name)), "committed")
    for process in alive:
        processes.stop(process)
    record.check(name, excused=True)
    found = effects(bus, name)
    assert len(found) == len(set(found)), "an effect happened twice"
    known, unknown = record.sent(name), record.sent(name, "unknown")
    assert known <= set(found) <= known | unknown


@pytest.mark.parametrize("transactional", [False, True])
def test_stopped_for_longer_than_the_lease(
    db: Database, bus: Bus, record: Record, processes: Processes, transactional: bool
) -> None:
    """SIGSTOP, another worker takes over, SIGCONT: the late ack is refused."""
    prepare(bus, lease=1)
    config = {"queues": ["jobs"], "transactional": transactional, "work": 0.4}
    frozen = processes.start(db.dsn, name="frozen", **config)
    processes.ready(frozen)
    send(bus, record, "jobs", [1])
    eventually(lambda: record.count("begin") == 1, "at work")
    frozen.send_signal(signal.SIGSTOP)
    other = processes.start(db.dsn, name="other", **{**config, "work": 0})
    eventually(lambda: record.of("end") and record.of("end")[0].pid == other.pid, "the other one did it")
    eventually(lambda: settled(bus), "and acked it")
    frozen.send_signal(signal.SIGCONT)
    eventually(lambda: "too late" in processes.log(frozen) or "lost" in processes.log(frozen), "it is told")
    for process in (frozen, other):
        processes.stop(process)
    begins = record.of("begin")
    assert [(x.pid, x.attempt) for x in begins] == [(frozen.pid, 1), (other.pid, 2)]
    assert settled(bus)
    if transactional:
        assert effects(bus, "jobs") == [1], "one effect, of the one who acked"
