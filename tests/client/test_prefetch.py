"""How much a loop holds at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from postbus import Bus, Queue
from tests.client.conftest import count, eventually, in_flight
from tests.conftest import Database


@pytest.fixture
def queue(bus: Bus) -> Queue[Any]:
    return bus.queue("emails", create=True)


class Watch:
    """Looks all the time how many messages are out."""

    def __init__(self, db: Database, name: str) -> None:
        self.most = 0
        self._conn = db.connect()
        self._name = name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        query = "select coalesce(sum(messages), 0) from postbus.in_flight(%s)"
        while not self._stop.is_set():
            row = self._conn.execute(query, (self._name,)).fetchone()
            assert row is not None
            self.most = max(self.most, int(row[0]))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize(("max", "prefetch", "bound"), [(10, 25, 25), (10, None, 20), (10, 4, 4), (1, 1, 1)])
def test_never_more_than_prefetch(
    queue: Queue[Any], db: Database, max: int, prefetch: int | None, bound: int
) -> None:
    queue.send_batch(list(range(200)))
    seen = []
    with Watch(db, "emails") as watch:
        for m in queue.messages(max=max, prefetch=prefetch, wait=0):
            seen.append(m.payload)
            if m.payload in (0, 30, 100):
                # While a body takes its time, the rest of the room is filled; and no more.
                eventually(lambda: in_flight(db, "emails") > bound // 2)
    assert seen == list(range(200))
    assert bound // 2 < watch.most <= bound


def test_never_more_of_a_stream(bus: Bus, db: Database) -> None:
    stream = bus.stream("orders", create=True, lanes=4)
    group = stream.group("billing", ordering="none")
    stream.publish_batch(list(range(300)), key=[str(n % 20) for n in range(300)])
    with Watch(db, "orders") as watch:
        seen = [m.payload for m in group.messages(max=7, prefetch=20, wait=0)]
    assert sorted(seen) == list(range(300))
    assert watch.most <= 20


def test_what_is_done_but_not_settled_counts(queue: Queue[Any], db: Database) -> None:
    """A database that is slow to take acks is not asked for ever more messages."""
    queue.send_batch(list(range(100)))
    blocker = db.connect(autocommit=False)
    seen = []
    messages = queue.messages(max=10, prefetch=20)
    for m in messages:
        seen.append(m.payload)
        if len(seen) == 1:
            eventually(lambda: in_flight(db, "emails") == 20)
            blocker.execute("lock table postbus.queued in share mode")
        if len(seen) == 20:
            break
    assert in_flight(db, "emails") == 20
    blocker.rollback()
    messages.close()
    assert count(db, "select count(*) from postbus.peek('emails', max => 200)") == 80


def test_what_was_not_begun_is_given_back_at_close(queue: Queue[Any], db: Database) -> None:
    queue.send_batch(list(range(30)))
    with queue.messages(max=10) as messages:
        for m in messages:
            eventually(lambda: in_flight(db, "emails") == 20)
            assert m.payload == 0
            break
    # The attempt does not count, and nothing is out any more.
    rows = db.connect().execute("select distinct state, attempt from postbus.peek('emails', max => 100)")
    assert rows.fetchall() == [("ready", 0)]
    assert count(db, "select count(*) from postbus.peek('emails', max => 100)") == 29


def test_a_stream_gives_back_too(bus: Bus, db: Database) -> None:
    stream = bus.stream("orders", create=True)
    group = stream.group("billing", ordering="stream")
    stream.publish_batch(list(range(30)))
    with group.messages(max=10) as messages:
        for m in messages:
            assert m.payload == 0
            break
    assert in_flight(db, "orders") == 0
    seen = [(m.payload, m.attempt) for m in group.messages(wait=0)]
    assert seen == [(n, 1) for n in range(1, 30)]
