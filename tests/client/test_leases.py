"""Leases: kept while somebody works, and what happens when they are lost all the same."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from postbus import Bus, Group, LeaseLost, Queue
from postbus.client import _pace
from tests.client.conftest import count, eventually, fail, in_flight, moved_clock, opened, raises, transaction
from tests.conftest import Database


@pytest.fixture
def queue(bus: Bus) -> Queue[Any]:
    return bus.queue("emails", create=True, backoff=0)


@pytest.fixture
def group(bus: Bus) -> Group[Any]:
    return bus.stream("orders", create=True).group("billing", ordering="stream", backoff=0)


def test_kept_while_the_body_runs(queue: Queue[Any], another: Callable[..., Bus]) -> None:
    other = another().queue("emails")
    queue.send_batch([1, 2, 3])
    seen = []
    for m in queue.messages(lease=1, wait=0):
        seen.append((m.payload, m.attempt))
        if m.payload == 1:
            assert len(other.receive(max=3, wait=2.5)) == 0  # neither the one in hand nor those in line
    assert seen == [(1, 1), (2, 1), (3, 1)]
    assert queue.peek() == []


def test_kept_of_a_stream(group: Group[Any], another: Callable[..., Bus]) -> None:
    other = another().stream("orders").group("billing")
    group.stream.publish_batch([1, 2, 3])
    seen = []
    for m in group.messages(lease=1, wait=0):
        seen.append((m.payload, m.attempt))
        if m.payload == 2:
            assert len(other.consume(wait=2.5)) == 0
    assert seen == [(1, 1), (2, 1), (3, 1)]
    assert len(other.consume()) == 0


def test_kept_of_a_receive(queue: Queue[Any], another: Callable[..., Bus]) -> None:
    other = another().queue("emails")
    queue.send_batch([1, 2])
    seen = []
    for m in queue.receive(max=2, lease=1):
        seen.append(m.payload)
        if m.payload == 1:
            assert len(other.receive(max=3, wait=2.5)) == 0
    assert seen == [1, 2]
    assert queue.peek() == []


def test_default_lease_of_the_queue(bus: Bus, another: Callable[..., Bus]) -> None:
    queue = bus.queue("quick", create=True, lease=1)
    other = another().queue("quick")
    queue.send(1)
    for _ in queue.messages(wait=0):
        assert len(other.receive(wait=2.5)) == 0


def take_over(db: Database, *, max: int = 100) -> list[str]:
    """Somebody else takes messages whose leases have ended, as his clock says."""
    rows = moved_clock(db, 3600).execute("select payload from postbus.receive('emails', %s)", (max,))
    return [payload for (payload,) in rows]


def test_late_verbs_are_refused(queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3, 4, 5])
    taken = queue.receive(max=5).messages
    assert len(take_over(db)) == 5
    for m, verb in zip(taken, ("ack", "nack", "dead_letter", "release", "extend"), strict=True):
        with pytest.raises(LeaseLost, match="lease lost"):
            getattr(m, verb)()


def test_loop_goes_on_when_an_ack_comes_too_late(
    queue: Queue[Any], db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send(1)
    seen = []
    with caplog.at_level(logging.WARNING, "postbus"):
        for m in queue.messages(wait=0):
            seen.append(m.payload)
            if m.payload == 1:
                assert take_over(db) == ["1"]
                queue.send(2)
    assert seen == [1, 2]
    assert [t for t in caplog.messages if "emails: ack came too late" in t]
    assert [m.payload for m in queue.peek()] == [1]


def test_verb_in_the_loop_that_comes_too_late(queue: Queue[Any], db: Database) -> None:
    queue.send(1)
    for m in queue.messages(wait=0):
        take_over(db)
        with pytest.raises(LeaseLost):
            m.ack()


def test_one_lost_receipt_does_not_keep_the_others(
    queue: Queue[Any], db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_batch(list(range(100)))
    with caplog.at_level(logging.WARNING, "postbus"):
        for batch in queue.batches(max=100, wait=0):
            # 7 others are finished behind the back of this loop; then all 100 are acked in one call.
            for m in batch[10:80:10]:
                db.connect().execute("select postbus.ack(%s::text)", (m.receipt,))
    assert queue.peek() == []
    assert len([t for t in caplog.messages if "ack came too late" in t]) == 7


def test_nacks_beside_a_lost_one(queue: Queue[Any], db: Database) -> None:
    queue.send_batch(list(range(20)))
    with raises(ZeroDivisionError), queue.batches(max=20) as batches:
        for batch in batches:
            db.connect().execute("select postbus.dead_letter(%s::text)", (batch[5].receipt,))
            fail()
    assert in_flight(db, "emails") == 0
    assert count(db, "select count(*) from postbus.peek('emails', 'ready', max => 99)") == 19


def test_what_was_lost_is_not_begun(
    queue: Queue[Any], db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_batch([1, 2, 3, 4])
    seen = []
    with caplog.at_level(logging.WARNING, "postbus"):
        for m in queue.messages(lease=0.9, wait=0):
            seen.append(m.payload)
            if m.payload == 1:
                assert len(take_over(db)) == 4
                queue.send(5)
                eventually(lambda: any("leases of 4 messages were lost" in text for text in caplog.messages))
    assert seen == [1, 5]
    assert count(db, "select count(*) from postbus.peek('emails', 'in_flight')") == 4


def test_a_stream_that_is_moved_under_the_loop(group: Group[Any], another: Callable[..., Bus]) -> None:
    """Seek ends open leases: what was not begun is dropped, and read again from the new position."""
    other = another().stream("orders").group("billing")
    group.stream.publish_batch([1, 2, 3])
    seen = []
    for m in group.messages(lease=0.6, wait=0):
        seen.append(m.payload)
        if seen == [1]:
            other.seek("earliest")
            time.sleep(0.5)  # the loop finds out when it extends the lease
    assert seen in ([1, 1, 2, 3], [1, 2, 1, 2, 3])
    assert len(other.consume()) == 0


PAUSED = """
import sys
from postbus import Bus
with Bus(sys.argv[1]) as bus:
    queue = bus.queue("emails")
    for m in queue.messages(lease=1):
        print(m.payload, flush=True)
        if m.payload == 1:
            sys.stdin.readline()
        if m.payload == "end":
            m.ack()
            break
"""


def test_process_that_was_paused_past_its_lease(db: Database) -> None:
    with Bus(db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        queue.send_batch([1, 2, 3])
        child = subprocess.Popen(
            [sys.executable, "-c", PAUSED, db.dsn],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == "1\n"
            child.send_signal(signal.SIGSTOP)
            taken = queue.receive(max=3, wait=20, lease=60).messages
            assert [(m.payload, m.attempt) for m in taken] == [(1, 2), (2, 2), (3, 2)]
            queue.send("end")
            child.stdin.write("\n")
            child.stdin.flush()
            child.send_signal(signal.SIGCONT)
            # It has 2 and 3 in line, but they are ours now.
            assert child.stdout.readline() == "end\n"
            assert child.wait(30) == 0
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()
        bus.ack(taken)
        assert queue.peek() == []


def test_batch_that_was_taken_too_long_ago(queue: Queue[Any], another: Callable[..., Bus]) -> None:
    queue.send_batch([1, 2])
    batch = queue.receive(max=2, lease=0.2)
    other = another().queue("emails").receive(max=1, wait=20, lease=60)
    assert [m.payload for m in other.messages] == [1]
    assert [m.payload for m in batch] == [2]


def test_transaction_that_is_open_for_long(bus: Bus, group: Group[Any], db: Database) -> None:
    """The lease cannot be extended while a transaction of the user's has locked it; nobody waits for ever."""
    group.stream.publish_batch([1, 2, 3, 4])
    with transaction(bus, db.dsn) as conn:
        seen = []
        for m in group.messages(lease=0.6, wait=0):
            seen.append(m.payload)
            m.ack(conn=conn)
            time.sleep(0.4)
    assert seen == [1, 2, 3, 4]
    assert len(group.consume()) == 0


def test_rollback_of_one_ack_of_a_page(bus: Bus, group: Group[Any], db: Database) -> None:
    """What the loop acks is exactly what it has handled, also when it has handled all the rest of a page."""
    group.stream.publish_batch([1, 2, 3, 4])
    with group.messages(lease=1) as messages:
        for m in messages:
            if m.payload == 2:
                with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
                    m.ack(conn=conn)
                    fail()
            if m.payload == 4:
                break
    again = group.consume(wait=10)
    assert [(m.payload, m.attempt) for m in again] == [(2, 2)]


def test_open_transaction_and_the_rest_of_its_page(bus: Bus, group: Group[Any], db: Database) -> None:
    """The loop is closed inside the transaction that holds a lock on its lease."""
    group.stream.publish_batch([1, 2])
    began = time.monotonic()
    with transaction(bus, db.dsn) as conn:
        with group.messages() as messages:
            for m in messages:
                if m.payload == 1:
                    m.ack(conn=conn)
                else:
                    break
        assert time.monotonic() - began < 8
        assert in_flight(db, "orders") == 2
    eventually(lambda: in_flight(db, "orders") == 0)
    assert len(group.consume()) == 0


def test_bus_is_closed_inside_such_a_transaction(
    kind: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pace, "CLOSE", 2.0)
    with opened(kind, db.dsn) as bus:
        group = bus.stream("orders", create=True).group("billing", ordering="stream", backoff=0)
        group.stream.publish_batch([1, 2])
        began = time.monotonic()
        with transaction(bus, db.dsn) as conn, group.messages() as messages:
            for m in messages:
                if m.payload == 1:
                    m.ack(conn=conn)
                else:
                    break
            bus.close()
        assert time.monotonic() - began < 20
    # 2 could not be acked from outside of the transaction, so it comes again; 1 does not.
    later = moved_clock(db, 3600)
    found = later.execute("select payload from postbus.consume('orders', 'billing')").fetchall()
    assert found == [("2",)]
