"""Connections that are ended by the server, again and again, while work goes on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from postbus import Bus, Worker
from postbus.worker import _maintainer
from tests.conftest import Database
from tests.faults.app import made
from tests.faults.conftest import LONG, Producer, Start, effects, prepare, settled, wait_until_done
from tests.faults.record import Record
from tests.worker.waiting import eventually

# Which connections a role has, by what they asked last.
ROLES = {
    "producer": "application_name = 'producer'",
    "fetch": "query like '%postbus.receive(%' or query like '%postbus.consume(%'",
    "settle": "query like '%postbus.ack(%'",
    "listener": "query ilike 'listen %' or query like '%pg_notify%'",
    "maintainer": f"pid in (select pid from pg_locks where objid = {_maintainer.LOCK})",
    "handler": "query like '%into effect%' or query like '%pg_sleep%'",
    "everybody": "true",
}


class Storm:
    """Ends the connections of one role, many times a second."""

    def __init__(self, db: Database, role: str) -> None:
        self._dsn = db.dsn
        self._where = ROLES[role]
        self.ended = 0

    def rage(self, seconds: float, every: float = 0.05) -> None:
        until = time.monotonic() + seconds
        with psycopg.connect(self._dsn, autocommit=True, application_name="storm") as conn:
            while time.monotonic() < until:
                self.ended += conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and application_name not in ('storm', 'quiet')"
                    f" and ({self._where})"
                ).rowcount
                time.sleep(every)


def config(db: Database, record: Record, **more: Any) -> dict[str, Any]:
    common = {"dsn": db.dsn, "record": str(record.path), "concurrency": 4, "prefetch": 20, "maintain": True}
    return {**common, **more}


@pytest.mark.parametrize("role", ROLES)
def test_storm(
    db: Database, record: Record, start: Start, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_maintainer, "EVERY", 0.05)
    monkeypatch.setattr(_maintainer, "CANDIDATE_EVERY", 0.2)
    transactional = role == "handler"
    with Bus(f"{db.dsn} application_name=quiet") as bus:
        prepare(bus, lease=5)
        work = 0.02 if transactional else 0
        options = config(
            db, record, queues=["jobs"], streams=["events"], transactional=transactional, work=work
        )
        start(made(options))
        storm = Storm(db, role)
        with Producer(db.dsn, record):
            eventually(lambda: record.count("end") > 10, "at work")
            storm.rage(20 if LONG else 1.2)
        assert storm.ended >= 3
        wait_until_done(record, "jobs", "events", within=30)
        eventually(lambda: settled(bus), "everything is acked")
        # What was handled may come again when the answer to its ack got lost on the way, and only then.
        record.check("jobs", excused=True)
        record.check("events", ordered=True, excused=True)
        if role in ("producer", "listener", "maintainer"):
            record.check("jobs")
            record.check("events", ordered=True)
        if transactional:
            for source in ("jobs", "events"):
                found = effects(bus, source)
                assert len(found) == len(set(found)), "an effect happened twice"
                assert record.sent(source) <= set(found)


def test_only_the_listener_is_ended(db: Database, start: Start) -> None:
    """Afterwards messages are heard of again at once, not only when the worker looks for itself."""
    arrived: dict[int, float] = {}
    told = threading.Event()
    worker = Worker(db.dsn, maintain=False)

    @worker.queue("q", create=True)
    async def handle(m: Any) -> None:
        arrived[m.payload] = time.monotonic()
        told.set()

    start(worker)
    with Bus(f"{db.dsn} application_name=quiet") as bus, psycopg.connect(db.dsn, autocommit=True) as conn:
        listeners = (
            "select pid from pg_stat_activity where datname = current_database() and query ilike 'listen %'"
        )

        def listener() -> int | None:
            row = conn.execute(listeners).fetchone()
            return None if row is None else int(row[0])

        queue = bus.queue("q")
        latency = measure(queue.send, arrived, told, range(10))
        assert latency < 0.3, "by notification"
        for n in range(20 if LONG else 3):
            before = eventually(listener, "it listens")
            conn.execute("select pg_terminate_backend(%s)", (before,))
            eventually(lambda: listener() not in (None, before), "it listens again", within=10)  # noqa: B023
            latency = measure(queue.send, arrived, told, range(100 * n + 100, 100 * n + 110))
            assert latency < 0.3, "by notification again"


def measure(
    send: Callable[[int], Any], arrived: dict[int, float], told: threading.Event, numbers: range
) -> float:
    """The median time from the send to the handler, on an idle system."""
    times = []
    for number in numbers:
        time.sleep(0.03)  # for the worker to be idle again
        told.clear()
        began = time.monotonic()
        send(number)
        assert told.wait(10)
        times.append(arrived[number] - began)
    return sorted(times)[len(times) // 2]


def test_everything_at_once_in_a_process(db: Database, record: Record) -> None:
    """The same loop without a thread around it: `run` neither raises nor ends before it is told to."""
    with Bus(f"{db.dsn} application_name=quiet") as bus:
        prepare(bus, lease=5)
        worker = made(json.loads(json.dumps(config(db, record, queues=["jobs"], streams=["events"]))))

        async def main() -> None:
            task = asyncio.create_task(worker.run())
            storm = Storm(db, "everybody")
            with Producer(db.dsn, record):
                await asyncio.to_thread(storm.rage, 5 if LONG else 0.5, 0.02)
            assert not task.done()
            await asyncio.to_thread(wait_until_done, record, "jobs", "events")
            worker.stop()
            await task

        asyncio.run(main())
        record.check("jobs", excused=True)
        record.check("events", ordered=True, excused=True)
