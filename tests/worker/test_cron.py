"""Functions that are called at certain times."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from postbus import BadArgument, Bus, Message, NotFound, Worker
from tests.conftest import Database
from tests.worker.conftest import Start, dead, messages
from tests.worker.waiting import eventually


def fire(db: Database, *, ago: str = "1 second") -> int:
    """Let a schedule be due, and do the upkeep; returns how many slots fired."""
    conn = db.connect()
    conn.execute("update postbus.schedule set next_at = now() - %s::interval", (ago,))
    query = "select coalesce(sum(done), 0)::int from postbus.maintain() where step = 'fired'"
    row = conn.execute(query).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_the_result_is_sent_once_per_slot(
    worker: Worker, bus: Bus, db: Database, start: Start, kind: str
) -> None:
    bus.queue("reports", create=True)
    calls: list[int] = []

    def daily() -> dict[str, int]:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("the first try fails")
        return {"call": len(calls)}

    if kind == "thread":
        worker.cron("0 9 * * *", queue="reports", timezone="Europe/Zurich")(daily)
    else:

        @worker.cron("0 9 * * *", queue="reports", timezone="Europe/Zurich", name="daily")
        async def on_loop() -> dict[str, int]:
            return daily()

    start(worker)
    [(cron, zone, target)] = bus.fetch("select cron, timezone, target from postbus.list_schedules()", ())
    assert (cron, zone, target) == ("0 9 * * *", "Europe/Zurich", "cron.daily")
    assert fire(db) == 1
    eventually(lambda: messages(bus, "reports"), "sent")
    eventually(lambda: messages(bus, "cron.daily") == [], "the slot is done")
    assert [p for p, _, _ in messages(bus, "reports")] == ['{"call":2}']
    [(headers,)] = bus.fetch("select headers from postbus.peek('reports')", ())
    assert headers["schedule"] == "daily"
    assert headers["slot"].endswith("Z")


def test_two_workers_with_the_same_cron(worker: Worker, bus: Bus, db: Database, start: Start) -> None:
    bus.queue("reports", create=True)
    called_by: list[str] = []

    def equip(made: Worker) -> Worker:
        @made.cron("* * * * *", queue="reports", missed="all")
        async def minutely() -> str:
            called_by.append(made.name)
            return made.name

        return made

    other = Worker(worker.dsn, name="other", maintain=False)
    start(equip(worker))
    start(equip(other))
    count = fire(db, ago="20 minutes")
    assert count >= 20
    eventually(lambda: len(messages(bus, "reports")) == count, "sent")
    eventually(lambda: messages(bus, "cron.minutely") == [], "done")
    assert len(called_by) == len(messages(bus, "reports")) == count
    slots = bus.fetch("select distinct headers ->> 'slot' from postbus.peek('reports', max => 100)", ())
    assert len(slots) == count


def test_it_may_take_the_message_of_its_slot(worker: Worker, bus: Bus, db: Database, start: Start) -> None:
    slots: list[str] = []
    done = threading.Event()

    @worker.cron("0 9 * * *")
    def daily(m: Message[Any]) -> None:
        slots.append(m.headers["slot"])
        done.set()

    start(worker)
    assert fire(db) == 1
    assert done.wait(30)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", slots[0])


def test_nothing_is_sent_for_none(worker: Worker, bus: Bus, db: Database, start: Start) -> None:
    bus.queue("reports", create=True)
    done = threading.Event()

    @worker.cron("0 9 * * *", queue="reports")
    def daily() -> None:
        done.set()

    start(worker)
    fire(db)
    assert done.wait(30)
    eventually(lambda: messages(bus, "cron.daily") == [], "done")
    assert messages(bus, "reports") == []


def test_a_change_of_the_times(worker: Worker, bus: Bus, db: Database, start: Start) -> None:
    @worker.cron("0 9 * * *", name="report")
    def daily() -> None: ...

    running = start(worker)
    running.stop()
    other = Worker(worker.dsn, maintain=False)

    @other.cron("30 10 * * *", name="report")
    def later() -> None: ...

    start(other)
    assert bus.fetch("select name, cron from postbus.list_schedules()", ()) == [("report", "30 10 * * *")]


def test_a_call_that_hangs(worker: Worker, bus: Bus, db: Database, start: Start) -> None:
    hang = threading.Event()

    @worker.cron("0 9 * * *", timeout=0.1)
    def daily() -> None:
        hang.wait(60)

    start(worker)
    fire(db)
    failed = "select attempt, reason from postbus.peek('cron.daily')"
    eventually(lambda: [r for _, r in bus.fetch(failed, ()) if r], "failed")
    hang.set()
    assert "not done after 0.1 seconds" in bus.fetch(failed, ())[0][1]
    assert not dead(bus, "cron.daily")


def test_the_queue_must_be_there(worker: Worker, start: Start) -> None:
    @worker.cron("0 9 * * *", queue="nowhere")
    def daily() -> None: ...

    with pytest.raises(NotFound, match="nowhere"):
        start(worker)


def test_a_queue_of_the_same_worker_is_made_first(
    worker: Worker, bus: Bus, db: Database, start: Start
) -> None:
    got: list[Any] = []

    @worker.cron("0 9 * * *", queue="reports")
    def daily() -> str:
        return "report"

    @worker.queue("reports", create=True)
    async def report(m: Message[Any]) -> None:
        got.append(m.payload)

    start(worker)
    fire(db)
    eventually(lambda: got == ["report"], "all the way")


def test_times_that_are_none(worker: Worker, start: Start) -> None:
    @worker.cron("at noon")
    def daily() -> None: ...

    with pytest.raises(BadArgument, match="at noon"):
        start(worker)


def test_what_makes_no_sense(worker: Worker) -> None:
    def two(a: int, b: int) -> None: ...
    def generator() -> Any:
        yield 1

    with pytest.raises(BadArgument, match="takes nothing, or the message"):
        worker.cron("0 9 * * *")(two)
    with pytest.raises(BadArgument, match="generator"):
        worker.cron("0 9 * * *")(generator)
    worker.cron("0 9 * * *", name="daily")(lambda: None)
    with pytest.raises(BadArgument, match="two cron functions are called 'daily'"):
        worker.cron("0 9 * * *", name="daily")(lambda: None)
