"""SIGTERM under load: a clean end, again and again, and nothing is handled twice."""

from __future__ import annotations

import random
import time

from postbus import Bus
from tests.conftest import Database
from tests.faults.conftest import LONG, Processes, Producer, prepare, settled, wait_until_done
from tests.faults.record import Record
from tests.worker.waiting import eventually

GRACE = 10.0


def test_sigterm_under_load(db: Database, bus: Bus, record: Record, processes: Processes) -> None:
    prepare(bus, lease=30)
    rnd = random.Random(1)
    config = {
        "queues": ["jobs"],
        "streams": ["events"],
        "concurrency": 4,
        "prefetch": 40,
        "work": 0.005,
        "grace": GRACE,
    }
    # More than the workers can do, so that there is always something taken and not begun.
    with Producer(db.dsn, record, pause=0.0005):
        for _ in range(50 if LONG else 5):
            worker = processes.start(db.dsn, **config)
            before = record.count("end")
            eventually(lambda: record.count("end") > before + 20, "resumed at once", within=30)  # noqa: B023
            time.sleep(rnd.random() * 0.2)
            assert processes.stop(worker, within=GRACE) < GRACE
            at_work = "select coalesce(sum(in_flight), 0)::int from postbus."
            assert bus.fetch(f"{at_work}list_queues()", ()) == [(0,)], "given back"
            assert bus.fetch(f"{at_work}list_groups()", ()) == [(0,)], "given back"
            attempts = "select count(*)::int from postbus.peek('jobs', max => 100000) where attempt > 0"
            assert bus.fetch(attempts, ()) == [(0,)], "what was not begun does not count"
    last = processes.start(db.dsn, **{**config, "work": 0})
    wait_until_done(record, "jobs", "events")
    eventually(lambda: settled(bus), "acked")
    processes.stop(last)
    record.check("jobs")
    record.check("events", ordered=True)
    assert {x.attempt for x in record.of("begin")} == {1}
