"""Taking some messages, and finishing them one by one."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postbus import BadArgument, Bus, LeaseLost, Message, Queue
from tests.client.conftest import fail, in_flight, raises, transaction
from tests.conftest import Database


@pytest.fixture
def queue(bus: Bus) -> Queue[Any]:
    return bus.queue("emails", create=True, backoff=0, max_attempts=3)


def test_receive_is_a_sequence(queue: Queue[Any]) -> None:
    assert not queue.receive()
    queue.send_batch([1, 2, 3])
    batch = queue.receive(max=2)
    assert batch
    assert len(batch) == 2
    assert [m.payload for m in batch.messages] == [1, 2]
    assert batch[1].payload == 2


def test_one_by_default(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2])
    assert len(queue.receive()) == 1


def test_of_a_type(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3], type=["a", "b", "a"])
    assert [m.payload for m in queue.receive(max=10, type="a")] == [1, 3]
    assert [m.payload for m in queue.pop(max=10, type="b")] == [2]


def test_wait_for_the_first(queue: Queue[Any], another: Callable[..., Bus]) -> None:
    other = another().queue("emails")
    timer = threading.Timer(0.3, lambda: other.send("news"))
    timer.start()
    began = time.monotonic()
    assert [m.payload for m in queue.receive(wait=20)] == ["news"]
    assert 0.2 < time.monotonic() - began < 10
    timer.join()


def test_wait_for_what_is_delayed(queue: Queue[Any]) -> None:
    queue.send("later", delay=0.3)
    assert [m.payload for m in queue.receive(wait=20)] == ["later"]


def test_wait_in_vain(queue: Queue[Any]) -> None:
    began = time.monotonic()
    assert len(queue.receive(wait=0.3)) == 0
    assert 0.3 <= time.monotonic() - began < 5


def test_ack(queue: Queue[Any]) -> None:
    queue.send(1)
    [m] = queue.receive().messages
    assert queue.peek()[0].id == m.id
    m.ack()
    assert queue.peek() == []
    with pytest.raises(LeaseLost):
        m.ack()


def test_nack(queue: Queue[Any]) -> None:
    queue.send(1)
    queue.receive()[0].nack(reason="down", state={"page": 3})
    [m] = queue.receive().messages
    assert (m.attempt, m.state) == (2, {"page": 3})
    m.nack(delay=3600)
    assert len(queue.receive()) == 0
    assert [p.state for p in queue.peek(state="delayed")] == [{"page": 3}]


def test_last_nack_and_dead_letter(queue: Queue[Any]) -> None:
    queue.send(1)
    for _ in range(3):
        queue.receive()[0].nack(reason="down")
    queue.send(2)
    queue.receive()[0].dead_letter("no such address")
    assert [(d.payload, d.attempt, d.reason) for d in queue.dead_letters()] == [
        (1, 3, "down"),
        (2, 1, "no such address"),
    ]


def test_release(queue: Queue[Any]) -> None:
    queue.send(1)
    for _ in range(5):
        [m] = queue.receive().messages
        assert m.attempt == 1
        m.release()


def test_extend(queue: Queue[Any]) -> None:
    queue.send(1)
    [m] = queue.receive(lease=5).messages
    until = m.extend(3600, state={"n": 1})
    assert until - datetime.now(UTC) > timedelta(minutes=50)
    assert queue.peek()[0].state == {"n": 1}
    m.ack()
    with pytest.raises(LeaseLost):
        m.extend()


def test_many_at_once(bus: Bus, queue: Queue[Any]) -> None:
    queue.send_batch(list(range(8)))
    taken = queue.receive(max=8).messages
    assert bus.ack(taken[:2]) == 2
    assert bus.ack(taken[2]) == 1
    assert bus.ack(taken[3].receipt) == 1
    assert bus.nack(taken[4:5], reason="x") == 1
    assert bus.dead_letter([m.receipt for m in taken[5:6]], reason="y") == 1
    assert bus.extend(taken[6:], lease=100) > datetime.now(UTC)
    assert bus.release(taken[6:]) == 2
    assert sorted(m.payload for m in queue.receive(max=9)) == [4, 6, 7]


def test_nothing_at_all(bus: Bus) -> None:
    assert bus.ack([]) == bus.nack([]) == bus.release([]) == bus.dead_letter([]) == 0
    with pytest.raises(BadArgument):
        bus.extend([])


def test_all_or_nothing(bus: Bus, queue: Queue[Any]) -> None:
    queue.send_batch([1, 2])
    one, two = queue.receive(max=2).messages
    one.ack()
    with pytest.raises(LeaseLost):
        bus.ack([one, two])
    two.ack()


def test_what_is_no_receipt(bus: Bus, queue: Queue[Any]) -> None:
    queue.send(1)
    with pytest.raises(BadArgument, match="not a receipt"):
        bus.ack(queue.peek())


def test_finished_before_the_loop_comes_to_it(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3])
    batch = queue.receive(max=3)
    batch[1].dead_letter()
    assert [m.payload for m in batch] == [1, 3]
    assert queue.peek() == []


def test_pop(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3])
    popped = queue.pop(max=2)
    assert [type(m) for m in popped] == [Message, Message]
    assert [m.payload for m in popped] == [1, 2]
    assert [m.payload for m in queue.peek()] == [3]
    assert queue.pop(max=5)[0].payload == 3
    assert queue.pop() == []


def test_messages_can_go_to_another_process(queue: Queue[Any]) -> None:
    queue.send({"a": 1}, key="k", headers={"h": 1})
    [m] = queue.receive().messages
    copy = pickle.loads(pickle.dumps(m.plain()))
    assert type(copy) is Message
    assert copy == m.plain()
    assert (copy.id, copy.payload, copy.key, copy.headers, copy.receipt) == (
        m.id,
        {"a": 1},
        "k",
        {"h": 1},
        m.receipt,
    )


def test_deliveries_are_pickled_as_messages(db: Database) -> None:
    with Bus(db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        queue.send(1)
        [m] = queue.receive().messages
        assert pickle.loads(pickle.dumps(m)) == m.plain()


def test_messages_are_frozen(queue: Queue[Any]) -> None:
    m = Message(source="emails", id=1, payload=1)
    with pytest.raises(AttributeError):
        m.id = 2  # type: ignore[misc]


# In a transaction of the caller's


def test_effect_and_ack_commit_together(bus: Bus, queue: Queue[Any], db: Database) -> None:
    db.connect().execute("create table sent (id bigint primary key)")
    queue.send_batch([1, 2])
    one, two = queue.receive(max=2).messages
    with transaction(bus, db.dsn) as conn:
        conn.execute("insert into sent values (1)")
        one.ack(conn=conn)
        assert in_flight(db, "emails") == 2
    with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
        conn.execute("insert into sent values (2)")
        two.ack(conn=conn)
        fail()
    assert db.connect().execute("select id from sent").fetchall() == [(1,)]
    assert [m.payload for m in queue.peek(state="in_flight")] == [2]
    two.ack()


def test_late_ack_spoils_the_effect(bus: Bus, queue: Queue[Any], db: Database) -> None:
    db.connect().execute("create table sent (id bigint primary key)")
    queue.send(1)
    [m] = queue.receive().messages
    m.nack()
    with raises(LeaseLost), transaction(bus, db.dsn) as conn:
        conn.execute("insert into sent values (1)")
        m.ack(conn=conn)
    assert db.connect().execute("select id from sent").fetchall() == []


@pytest.mark.parametrize("verb", ["nack", "dead_letter", "release", "extend"])
def test_other_verbs_roll_back_too(bus: Bus, queue: Queue[Any], db: Database, verb: str) -> None:
    queue.send(1)
    [m] = queue.receive(lease=60).messages
    with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
        getattr(m, verb)(conn=conn)
        fail()
    assert len(queue.receive()) == 0
    assert queue.dead_letters() == []
    m.ack()


def test_taken_and_finished_in_one_transaction(bus: Bus, queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3, 4])
    with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
        for m in queue.receive(max=4, conn=conn):
            if m.payload == 3:
                fail()
    assert [m.attempt for m in queue.peek()] == [0] * 4
    with transaction(bus, db.dsn) as conn:
        for m in queue.receive(max=4, lease=0.001, conn=conn):
            if m.payload == 2:
                m.dead_letter("two")
            elif m.payload == 3:
                m.nack(delay=3600)
            assert len(queue.peek()) == 4
    assert [m.payload for m in queue.peek()] == [3]
    assert [d.payload for d in queue.dead_letters()] == [2]


def test_in_one_transaction_with_a_with_block(bus: Bus, queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3])
    with (
        transaction(bus, db.dsn) as conn,
        raises(ZeroDivisionError),
        queue.receive(max=3, conn=conn) as batch,
    ):
        for m in batch:
            if m.payload == 2:
                fail()
    # 1 is done, 2 has failed, 3 was not begun.
    assert sorted((m.payload, m.attempt) for m in queue.receive(max=10).messages) == [(2, 2), (3, 1)]


def test_a_transaction_that_has_failed_tells_nothing(bus: Bus, queue: Queue[Any], db: Database) -> None:
    queue.send(1)
    with (
        raises(Exception, match="division by zero"),
        transaction(bus, db.dsn) as conn,
        queue.receive(conn=conn) as batch,
    ):
        for _ in batch:
            conn.execute("select 1 / 0")
    assert [m.attempt for m in queue.receive().messages] == [1]


def test_events_in_one_transaction(bus: Bus, db: Database) -> None:
    stream = bus.stream("orders", create=True)
    group = stream.group("billing", ordering="key", backoff=0)
    stream.publish_batch([1, 2, 3, 4], key=["a", "b", "a", "b"])
    with transaction(bus, db.dsn) as conn:
        seen = []
        for m in group.consume(conn=conn):
            seen.append(m.payload)
            if m.payload == 1:
                m.nack(reason="not yet")
    # 3 stays behind 1.
    assert seen == [1, 2, 4]
    assert [m.payload for m in group.consume()] == [1]
    assert [m.payload for m in group.consume()] == [3]
