"""Publishing to streams."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postbus import BadArgument, Bus, Group, NotFound, Stream
from tests.client.conftest import fail, moved_clock, raises, transaction
from tests.conftest import Database


@pytest.fixture
def stream(bus: Bus) -> Stream[Any]:
    return bus.stream("orders", create=True)


@pytest.fixture
def group(stream: Stream[Any]) -> Group[Any]:
    return stream.group("billing", start="earliest")


def test_one(stream: Stream[Any], group: Group[Any]) -> None:
    assert stream.publish({"id": 1}, type="order.created", key="customer-1", headers={"h": 1}) == 1
    [m] = group.consume()
    assert (m.source, m.group, m.id, m.payload) == ("orders", "billing", 1, {"id": 1})
    assert (m.type, m.key, m.headers, m.attempt) == ("order.created", "customer-1", {"h": 1}, 1)
    assert m.batch is not None
    assert m.receipt.startswith(m.batch)
    assert m.created_at is not None


def test_batch(stream: Stream[Any], group: Group[Any]) -> None:
    assert stream.publish_batch([]) == []
    assert stream.publish_batch([1, 2], type="t", key="k", headers={"h": 1}) == [1, 2]
    assert stream.publish_batch([3, 4], type=["a", "b"], key=[None, "k"], headers=[None, {"h": 2}]) == [3, 4]
    found = group.consume().messages
    assert [(m.payload, m.type, m.key, m.headers) for m in found] == [
        (1, "t", "k", {"h": 1}),
        (2, "t", "k", {"h": 1}),
        (3, "a", None, {}),
        (4, "b", "k", {"h": 2}),
    ]


def test_batch_of_unequal_length(stream: Stream[Any]) -> None:
    with pytest.raises(BadArgument, match="'orders' has 1 payloads but 2 keys"):
        stream.publish_batch([1], key=["a", "b"])


def test_dedupe(stream: Stream[Any], group: Group[Any]) -> None:
    assert stream.publish(1, dedupe_key="import-7") == 1
    assert stream.publish(2, dedupe_key="import-7") == 1
    assert [m.payload for m in group.consume()] == [1]


def test_later(stream: Stream[Any], group: Group[Any], db: Database) -> None:
    stream.publish("later", deliver_at=datetime.now(UTC) + timedelta(minutes=5))
    assert len(group.consume()) == 0
    with pytest.raises(BadArgument, match="deliver_at needs a time zone"):
        stream.publish(1, deliver_at=datetime(2030, 1, 1))
    later = moved_clock(db, 301)
    later.execute("select postbus.maintain()")
    found = later.execute("select payload from postbus.consume('orders', 'billing')").fetchall()
    assert found == [('"later"',)]


def test_no_such_stream(bus: Bus) -> None:
    nowhere = bus.stream("nowhere")
    with pytest.raises(NotFound, match="nowhere"):
        nowhere.publish(1)
    with pytest.raises(NotFound, match="nowhere"):
        nowhere.publish_batch([1])
    with pytest.raises(NotFound, match="nowhere"):
        nowhere.group("billing")


def test_no_such_group(stream: Stream[Any]) -> None:
    group = stream.group("nobody", create=False)
    with pytest.raises(NotFound, match="nobody"):
        group.consume()
    with pytest.raises(NotFound, match="nobody"):
        next(iter(group.messages()))


def test_in_a_transaction_of_the_callers(
    bus: Bus, stream: Stream[Any], group: Group[Any], db: Database
) -> None:
    with transaction(bus, db.dsn) as conn:
        stream.publish(1, conn=conn)
        stream.publish_batch([2, 3], conn=conn)
        assert len(group.consume()) == 0
    with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
        stream.publish(4, conn=conn)
        fail()
    assert [m.payload for m in group.consume()] == [1, 2, 3]
