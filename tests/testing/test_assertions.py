"""Assertions look at everything that is there, move nothing, and say what they found."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import msgspec
import pydantic
import pytest

from postbus import Bus, NotFound
from postbus.serializers import Bytes
from postbus.testing import Assertions


@dataclass
class Data:
    to: str


class Struct(msgspec.Struct):
    to: str


class Model(pydantic.BaseModel):
    to: str


@pytest.fixture
def emails(bus: Bus) -> Any:
    queue = bus.queue("emails", create=True, max_attempts=1)
    queue.send({"to": "a"}, type="welcome", key="tenant-1")
    queue.send({"to": "b"}, delay=3600)
    return queue


def test_what_fits_is_returned(emails: Any, assert_sent: Any) -> None:
    [m] = assert_sent("emails", payload={"to": "a"}, type="welcome", key="tenant-1", count=1)
    assert (m.source, m.id, m.payload, m.key) == ("emails", 1, {"to": "a"}, "tenant-1")
    assert len(assert_sent("emails")) == 2
    assert assert_sent("emails", payload={"to": "c"}, count=0) == []
    assert_sent("emails", key=None, count=1)
    assert_sent("emails", payload={"to": ANY}, count=2)


@pytest.mark.parametrize("payload", [Data("a"), Struct("a"), Model(to="a")])
def test_payloads_may_be_models(emails: Any, assert_sent: Any, payload: object) -> None:
    assert_sent("emails", payload=payload, count=1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"payload": {"to": "c"}}, "has no messages with payload={'to': 'c'}; it has 2:"),
        ({"type": "other", "key": None}, "has no messages with type='other', key=None; it has 2:"),
        ({"payload": {"to": "a"}, "count": 2}, "has 1 messages with payload={'to': 'a'}, not 2; it has 2:"),
        ({"count": 0}, "has 2 messages, not 0; it has 2:"),
        ({"payload": Model(to="c")}, "has no messages with payload=Model(to='c'); it has 2:"),
    ],
)
def test_what_does_not_fit(emails: Any, assert_sent: Any, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_sent("emails", **asked)
    first, *rest = str(caught.value).splitlines()
    assert first == f"queue 'emails' {says}"
    assert rest == [
        "  1 type='welcome' key='tenant-1' payload={'to': 'a'} ready",
        "  2 type='default' key=None payload={'to': 'b'} delayed",
    ]


def test_messages_out_with_workers(emails: Any, assert_sent: Any) -> None:
    [m] = emails.receive().messages
    assert_sent("emails", payload={"to": "a"})
    with pytest.raises(AssertionError, match="in_flight"):
        assert_sent("emails", payload="x")
    m.ack()
    assert_sent("emails", count=1)


def test_long_lists_are_cut(bus: Bus, assert_empty: Any) -> None:
    bus.queue("numbers", create=True).send_batch(list(range(30)))
    with pytest.raises(AssertionError) as caught:
        assert_empty("numbers")
    lines = str(caught.value).splitlines()
    assert lines[0] == "queue 'numbers' is not empty; it has 30:"
    assert (len(lines), lines[-1]) == (22, "  and 10 more")


def test_an_empty_queue(bus: Bus, assert_sent: Any, assert_empty: Any) -> None:
    bus.queue("emails", create=True)
    assert_empty("emails")
    with pytest.raises(AssertionError, match=r"^queue 'emails' has no messages; it has no messages at all$"):
        assert_sent("emails")


def test_payloads_that_are_not_json(bus: Bus, assert_sent: Any) -> None:
    bus.queue("blobs", create=True, serializer=Bytes()).send(b"\x00\xff")
    bus.fetch("select postbus.send('blobs', 'not JSON')", ())
    assert_sent("blobs", payload=b"\x00\xff", count=1)
    assert_sent("blobs", payload="not JSON", count=1)


def test_events_are_there_before_and_after_they_are_consumed(bus: Bus, assert_published: Any) -> None:
    stream = bus.stream("orders", create=True)
    stream.publish({"id": 1}, type="order.created", key="customer-1")
    assert_published("orders", payload={"id": 1}, type="order.created", key="customer-1", count=1)
    assert len(list(stream.group("billing", start="earliest").consume())) == 1
    [event] = assert_published("orders", payload={"id": 1})
    assert event.id == 1


def test_looking_moves_no_group(bus: Bus, assert_published: Any) -> None:
    stream = bus.stream("orders", create=True)
    group = stream.group("billing")
    stream.publish(1)
    assert_published("orders", payload=1)
    assert [m.payload for m in group.consume()] == [1]


def test_events_for_later(bus: Bus, assert_published: Any) -> None:
    stream = bus.stream("orders", create=True)
    stream.publish("tomorrow", deliver_at=datetime.now(UTC) + timedelta(days=1))
    assert_published("orders", payload="tomorrow", count=1)
    with pytest.raises(AssertionError, match=r"stream 'orders' has no events with payload=1; .*\n.*until 2"):
        assert_published("orders", payload=1)


def test_one_stream_is_not_the_other(bus: Bus, assert_published: Any) -> None:
    bus.stream("orders", create=True).publish(1)
    bus.stream("others", create=True).publish(2)
    assert_published("orders", count=1)


def test_what_has_not_committed_is_not_there(bus: Bus, assert_sent: Any, assert_published: Any) -> None:
    queue, stream = bus.queue("emails", create=True), bus.stream("orders", create=True)
    with bus.pool.connection() as conn, conn.transaction():
        queue.send(1, conn=conn)
        stream.publish(1, conn=conn)
        assert_sent("emails", count=0)
        assert_published("orders", count=0)
    assert_sent("emails", count=1)
    assert_published("orders", count=1)


def test_groups_with_something_left(bus: Bus, assert_empty: Any) -> None:
    stream = bus.stream("orders", create=True)
    group = stream.group("billing", start="earliest", backoff="1 hour")
    assert_empty("orders", group="billing")
    stream.publish(1)
    with pytest.raises(AssertionError, match="group 'billing' of stream 'orders' is not done: 1 pending"):
        assert_empty("orders", group="billing")
    [m] = group.consume().messages
    with pytest.raises(AssertionError, match="1 in flight"):
        assert_empty("orders", group="billing")
    m.nack()
    with pytest.raises(AssertionError, match="1 waiting"):
        assert_empty("orders", group="billing")


def test_dead_letters(bus: Bus, emails: Any, dead_letters: Any) -> None:
    assert dead_letters("emails") == []
    [m] = emails.receive().messages
    m.dead_letter("no such address")
    [letter] = dead_letters("emails")
    assert (letter.id, letter.payload, letter.reason) == (1, {"to": "a"}, "no such address")
    assert emails.redrive(letter) == 1


def test_dead_letters_of_groups(bus: Bus, dead_letters: Any) -> None:
    stream = bus.stream("orders", create=True)
    stream.publish(1)
    for name in ("billing", "packing"):
        stream.group(name, start="earliest").consume().messages[0].dead_letter(f"no {name}")
    found = [(x.group, x.payload, x.reason) for x in dead_letters("orders")]
    assert found == [("billing", 1, "no billing"), ("packing", 1, "no packing")]
    assert [x.group for x in dead_letters("orders", group="packing")] == ["packing"]


@pytest.mark.parametrize("method", ["assert_sent", "assert_published", "assert_empty", "dead_letters"])
def test_names_that_do_not_exist(postbus_dsn: str, method: str) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        getattr(Assertions(postbus_dsn), method)("nowhere")


def test_a_group_that_does_not_exist(bus: Bus, assert_empty: Any) -> None:
    bus.stream("orders", create=True)
    with pytest.raises(NotFound, match="billing"):
        assert_empty("orders", group="billing")
