"""Sending to queues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postbus import BadArgument, Bus, LeaseLost, NotFound, Queue, QueueFull
from tests.client.conftest import count, fail, moved_clock, raises, transaction
from tests.conftest import Database


@pytest.fixture
def queue(bus: Bus) -> Queue[Any]:
    return bus.queue("emails", create=True)


def test_one(queue: Queue[Any]) -> None:
    assert queue.send({"to": "someone@example.com"}) == 1
    [m] = queue.receive(max=10)
    assert (m.source, m.id, m.payload) == ("emails", 1, {"to": "someone@example.com"})
    assert (m.type, m.key, m.headers, m.priority, m.state) == ("default", None, {}, 0, None)
    assert (m.attempt, m.group, m.batch) == (1, None, None)
    assert m.created_at is not None
    assert abs(m.created_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_all_arguments(queue: Queue[Any]) -> None:
    number = queue.send(
        [1, None, "ü"],
        type="welcome",
        key="tenant-7",
        headers={"trace": "4bf9", "n": 1},
        priority=9,
        delay=0,
        ttl=60,
        dedupe_key="once",
    )
    [m] = queue.receive()
    assert m.id == number
    assert (m.payload, m.type, m.key, m.priority) == ([1, None, "ü"], "welcome", "tenant-7", 9)
    assert m.headers == {"trace": "4bf9", "n": 1}


def test_delay(queue: Queue[Any], db: Database) -> None:
    queue.send("later", delay=60.5)
    queue.send("much later", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    queue.send("long ago", deliver_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert [m.payload for m in queue.receive(max=10)] == ["long ago"]
    assert [m.payload for m in queue.peek(state="delayed")] == ["later", "much later"]
    later = moved_clock(db, 61)
    assert later.execute("select payload from postbus.receive('emails', 10)").fetchall() == [('"later"',)]


def test_times_need_a_zone(queue: Queue[Any]) -> None:
    naive = datetime(2030, 1, 1)
    with pytest.raises(BadArgument, match=r"deliver_at needs a time zone: 2030-01-01T00:00:00"):
        queue.send(1, deliver_at=naive)
    with pytest.raises(BadArgument, match="deliver_at needs a time zone"):
        queue.send_batch([1], deliver_at=naive)


def test_delay_or_time(queue: Queue[Any]) -> None:
    with pytest.raises(BadArgument, match="delay or deliver_at"):
        queue.send(1, delay=1, deliver_at=datetime.now(UTC))


def test_ttl(queue: Queue[Any], db: Database) -> None:
    queue.send("code 4711", ttl=600)
    queue.send("news")
    later = moved_clock(db, 601)
    assert later.execute("select payload from postbus.receive('emails', 10)").fetchall() == [('"news"',)]


def test_dedupe(queue: Queue[Any]) -> None:
    first = queue.send(1, dedupe_key="a")
    assert queue.send(2, dedupe_key="a") == first
    assert queue.send(3, dedupe_key="b") != first
    assert [m.payload for m in queue.receive(max=10)] == [1, 3]


def test_priority(queue: Queue[Any]) -> None:
    for priority in (0, 9, 5):
        queue.send(priority, priority=priority)
    assert [m.payload for m in queue.receive(max=10)] == [9, 5, 0]
    with pytest.raises(BadArgument, match="priority"):
        queue.send(1, priority=10)


def test_full(bus: Bus) -> None:
    small = bus.queue("small", create=True, max_size=2)
    small.send_batch([1, 2])
    with pytest.raises(QueueFull, match="small"):
        small.send(3)
    with pytest.raises(QueueFull):
        small.send_batch([3, 4])
    assert len(small.peek()) == 2


def test_no_such_queue(bus: Bus) -> None:
    nowhere = bus.queue("nowhere")
    for send in (
        lambda: nowhere.send(1),
        lambda: nowhere.send_batch([1]),
        lambda: nowhere.send(1, priority=1),
    ):
        with pytest.raises(NotFound, match="nowhere"):
            send()


def test_batch_one_for_all(queue: Queue[Any]) -> None:
    ids = queue.send_batch([1, 2, 3], type="t", key="k", headers={"h": 1}, priority=4)
    assert ids == [1, 2, 3]
    found = queue.receive(max=10).messages
    assert [m.payload for m in found] == [1, 2, 3]
    assert {(m.type, m.key, m.priority) for m in found} == {("t", "k", 4)}
    assert all(m.headers == {"h": 1} for m in found)


def test_batch_one_for_each(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2], type=["a", "b"], key=["x", None], headers=[None, {"h": 2}], delay=0, ttl=60)
    one, two = queue.receive(max=10).messages
    assert (one.type, one.key, one.headers) == ("a", "x", {})
    assert (two.type, two.key, two.headers) == ("b", None, {"h": 2})


def test_batch_from_any_sequence(queue: Queue[Any]) -> None:
    assert queue.send_batch([]) == []
    assert len(queue.send_batch(range(3))) == 3
    assert len(queue.send_batch((1, 2), type=("a", "b"))) == 2
    assert len(queue.send_batch([{"n": i} for i in range(3000)])) == 3000


@pytest.mark.parametrize("what", ["type", "key", "headers"])
def test_batch_of_unequal_length(queue: Queue[Any], what: str, db: Database) -> None:
    wrong: Any = {"type": ["a"], "key": ["a", "b", "c"], "headers": [{}]}[what]
    with pytest.raises(BadArgument, match=r"'emails' has 2 payloads but [13] "):
        queue.send_batch([1, 2], **{what: wrong})
    assert count(db, "select count(*) from postbus.peek('emails')") == 0


def test_headers_that_are_no_json(queue: Queue[Any]) -> None:
    with pytest.raises(BadArgument, match=r"headers of a message to 'emails'"):
        queue.send(1, headers={"file": object()})


def test_cancel_and_purge(queue: Queue[Any]) -> None:
    one, _, three = queue.send_batch([1, 2, 3])
    assert queue.cancel(one)
    assert not queue.cancel(one)
    [taken] = queue.receive().messages
    assert not queue.cancel(taken.id)
    assert queue.cancel(three)
    queue.send(4)
    assert queue.purge() == 2
    with pytest.raises(LeaseLost):
        taken.ack()


def test_in_a_transaction_of_the_callers(bus: Bus, queue: Queue[Any], db: Database) -> None:
    with transaction(bus, db.dsn) as conn:
        conn.execute("create table customer (id int)")
        number = queue.send(1, key="k", conn=conn)
        queue.send(2, priority=3, conn=conn)
        queue.send_batch([3, 4], conn=conn)
        assert queue.receive(max=10).messages == []
    assert number == 1
    assert sorted(m.payload for m in queue.receive(max=10)) == [1, 2, 3, 4]
    assert count(db, "select count(*) from customer") == 0


def test_rollback_of_the_callers_transaction(bus: Bus, queue: Queue[Any], db: Database) -> None:
    with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
        queue.send(1, conn=conn)
        queue.send_batch([2, 3], conn=conn)
        fail()
    assert queue.peek() == []


def test_wrong_kind_of_connection(queue: Queue[Any]) -> None:
    with pytest.raises(BadArgument, match=r"conn is builtins\.str"):
        queue.send(1, conn="postgresql://localhost")


def test_key_policy(queue: Queue[Any]) -> None:
    queue.set_key_policy("tenant-7", concurrency=1)
    queue.send_batch([1, 2, 3], key=["tenant-7", "tenant-7", "tenant-8"])
    assert sorted(m.payload for m in queue.receive(max=10).messages) == [1, 3]
