"""Workers through PgBouncer in transaction mode, where there is no LISTEN and no lock of a session."""

from __future__ import annotations

import threading
from typing import Any

from postbus import Bus, Message, Worker
from tests.conftest import Database
from tests.worker.conftest import Start, dead, empty, messages
from tests.worker.waiting import eventually


def test_everything_once(pooled: Database, db: Database, bus: Bus, start: Start) -> None:
    db.connect().execute("create table effect (n int)")
    worker = Worker(pooled.dsn, name="pooled")
    seen: list[Any] = []

    @worker.queue("plain", create=True, concurrency=4, prefetch=20)
    async def plain(m: Message[Any]) -> None:
        if m.attempt == 1 and m.payload % 5 == 0:
            raise ValueError
        seen.append(m.payload)

    @worker.queue("transactional", create=True, transactional=True, concurrency=2, timeout=20)
    def transact(m: Message[Any], conn: Any) -> None:
        conn.execute("insert into effect values (%s)", (m.payload,))
        if m.attempt == 1 and m.payload % 5 == 0:
            raise ValueError

    events = bus.stream("s", create=True, lanes=2)
    order: list[Any] = []

    @worker.stream("s", group="g", ordering="key", start="earliest", transactional=True)
    async def event(m: Message[Any], conn: Any) -> None:
        order.append(m.payload)

    running = start(worker)
    bus.queue("plain").send_batch(list(range(50)))
    bus.queue("transactional").send_batch(list(range(20)))
    events.publish_batch(list(range(20)), key="k")
    for name in ("plain", "transactional"):
        eventually(empty(bus, name), "all acked")
    eventually(lambda: order == list(range(20)), "in order")
    assert sorted(seen) == list(range(50))
    rows = db.connect().execute("select n from effect order by n").fetchall()
    assert rows == [(n,) for n in range(20)]
    assert not dead(bus, "plain")
    running.stop()


def test_what_was_not_begun_is_given_back(pooled: Database, bus: Bus, start: Start) -> None:
    begun, go = threading.Event(), threading.Event()
    worker = Worker(pooled.dsn, maintain=False)

    @worker.queue("q", create=True, prefetch=6)
    def handle(m: Message[Any]) -> None:
        begun.set()
        assert go.wait(30)

    running = start(worker)
    bus.queue("q").send_batch(list(range(6)))
    assert begun.wait(30)
    worker.stop()
    eventually(
        lambda: sorted(s for _, s, _ in messages(bus, "q")) == ["in_flight"] + ["ready"] * 5, "given back"
    )
    go.set()
    running.join()
    assert [a for _, _, a in messages(bus, "q")] == [0] * 5
