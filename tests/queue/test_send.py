"""Sending: what is stored, when it is due, what is refused, and what the end of a transaction does to it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told

# The envelope.


def test_text_is_verbatim(either: Desk) -> None:
    texts = ['{"b": 1,  "a":2, "a":3}', "", " ", "not json", "\t\n\\ é 日本 🚌", "null", "x" * 300_000]
    for text in texts:
        either.send(text)
    either.send_all(*texts)
    page = either.receive()
    assert told(page) == texts + texts
    kinds = {(m.type, m.key, m.blob, m.headers, m.attempt, m.priority, m.state) for m in page}
    assert kinds == {("default", None, None, None, 1, 0, None)}


def test_jsonb_is_canonical(either: Desk) -> None:
    either.rows("select postbus.send('q', %s)", Jsonb({"b": 1, "aa": [1, None, "é"]}))
    either.rows("select postbus.send('q', '{\"a\":1,  \"a\":2}'::jsonb)")
    either.rows("select postbus.send_batch('q', array['null', '[1,  2]']::jsonb[])")
    assert told(either.receive()) == ['{"b": 1, "aa": [1, null, "é"]}', '{"a": 2}', "null", "[1, 2]"]


def test_bytea_keeps_every_byte(either: Desk) -> None:
    blobs = [b"\x00", bytes(range(256)), b""]
    for blob in blobs:
        either.rows("select postbus.send('q', %s::bytea)", blob)
    either.rows("select postbus.send_batch('q', %s::bytea[])", blobs)
    page = either.receive()
    assert [m.blob for m in page] == blobs + blobs
    assert set(told(page)) == {None}


def test_type_key_headers_and_time(bus: Office, either: Desk) -> None:
    bus.wait(12.5)
    number = either.send("p", "key 'é", type="order.created", headers='{"trace": {"id": 1}, "n": null}')
    either.send("p", "", type="", priority=9)
    second, first = either.receive()
    assert (first.id, first.type, first.key) == (number, "order.created", "key 'é")
    assert first.headers == {"trace": {"id": 1}, "n": None}
    assert first.created_at == bus.now
    assert (second.type, second.key, second.priority) == ("", "", 9)


def test_batch_has_one_of_everything_per_message(either: Desk) -> None:
    headers = [Jsonb({"n": 1}), None, Jsonb({})]
    ids = either.send_all("a", "b", "c", types=["t", "u", "t"], keys=["k", None, "l"], headers=headers)
    page = either.receive()
    assert [(m.id, m.payload, m.type, m.key, m.headers) for m in page] == [
        (ids[0], "a", "t", "k", {"n": 1}), (ids[1], "b", "u", None, None), (ids[2], "c", "t", "l", {}),
    ]  # fmt: skip
    assert ids == sorted(ids)


def test_batch_shares_its_options(bus: Office, either: Desk) -> None:
    either.send_all("a", "b", priority=3, delay="5 seconds", ttl="10 seconds")
    either.send_all("c", "d", deliver_at=bus.now + timedelta(seconds=5))
    assert either.receive() == []
    bus.wait(5)
    assert [(m.payload, m.priority) for m in either.receive(3)] == [("a", 3), ("b", 3), ("c", 0)]
    assert [p["expires_at"] is not None for p in either.peek(max=9)] == [False, True, True, False]


def test_empty_batch(either: Desk) -> None:
    assert either.send_all() == []
    assert either.receive() == []


# When.


def test_delay_and_deliver_at(bus: Office, either: Desk) -> None:
    either.send("delay", delay="10 seconds")
    either.send("at", deliver_at=bus.now + timedelta(seconds=5))
    either.send("past", deliver_at=bus.now - timedelta(days=1))
    either.send("negative", delay="-1 hour")
    either.send("now")
    assert either.drain() == [
        "past",
        "negative",
        "now",
    ]  # in the order of sending: none is due before it was sent
    bus.wait(4.9)
    assert either.receive() == []
    bus.wait(0.1)
    assert either.drain() == ["at"]
    bus.wait(4.9)
    assert either.receive() == []
    bus.wait(0.1)
    assert either.drain() == ["delay"]


# Refusals.


@pytest.mark.parametrize("with_limits", [False, True])
def test_refusals_name_the_queue(s: Desk, with_limits: bool) -> None:
    """The same from the quick way in as from the long one."""
    s.queue(priorities=False, max_size=100 if with_limits else None)
    s.queue("p", max_size=100 if with_limits else None)
    for to, call, saying in [
        ("q", "send('q', null::text)", "needs a payload, not null"),
        ("q", "send('q', null::jsonb)", "needs a payload, not null"),
        ("q", "send('q', null::bytea)", "needs a payload, not null"),
        ("q", "send('q', 'x', type => null)", "needs a type, not null"),
        ("q", "send('q', 'x', priority => 1)", "cannot have a priority"),
        ("p", "send('p', 'x', priority => 10)", "needs a priority from 0 to 9 (most urgent), not 10"),
        ("p", "send('p', 'x', priority => -1)", "needs a priority from 0 to 9 (most urgent), not -1"),
        ("p", "send('p', 'x', priority => null)", "needs a priority from 0 to 9 (most urgent), not null"),
        ("q", "send('q', 'x', delay => '1 s', deliver_at => now())", "takes delay or deliver_at, not both"),
        ("q", "send('q', 'x', delay => '2000 years')", "cannot be delayed that long"),
        ("q", "send('q', 'x', deliver_at => 'infinity')", "cannot be delayed that long"),
        ("q", "send('q', 'x', ttl => '0')", "needs a ttl longer than zero"),
        ("q", "send('q', 'x', ttl => '-1 s')", "needs a ttl longer than zero"),
        ("q", "send_batch('q', null::text[])", "needs a payload"),
        ("q", "send_batch('q', array['x', null])", "needs a payload, not null"),
        ("q", "send_batch('q', array['x'::bytea, null])", "needs a payload, not null"),
        ("q", "send_batch('q', array['x', 'y'], types => array['t'])", "has arrays that differ in length: 2"),
        ("q", "send_batch('q', array['x'], keys => array['k', 'l'])", "has arrays that differ in length: 1"),
        ("q", "send_batch('q', array['x'], headers => '{}')", "has arrays that differ in length: 1"),
        ("q", "send_batch('q', array['x', 'y'], types => array['t', null])", "needs a type, not null"),
        ("q", "send_batch('q', array['x'], priority => 2)", "cannot have a priority"),
    ]:
        with refused("PB003", f"send to queue '{to}' {saying}"):
            s.rows(f"select postbus.{call}")
    assert s.receive() == []
    assert s.receive(of="p") == []


# Transactions.


def test_rollback_sends_nothing(bus: Office, either: Desk) -> None:
    producer = bus.session().begin()
    producer.send("plain")
    producer.send("urgent", priority=5)
    producer.send("once", dedupe_key="d")
    producer.send_many(3)
    assert either.receive() == []
    producer.rollback()
    assert either.receive() == []
    assert either.send("once", dedupe_key="d") > 0
    assert either.drain() == ["once"]


def test_part_of_a_transaction_rolled_back(either: Desk) -> None:
    either.begin().send("a")
    either.rows("savepoint p")
    either.send("b")
    either.rows("rollback to p")
    either.sync()
    either.send("c")
    either.commit()
    assert either.drain() == ["a", "c"]


def test_sent_with_the_callers_own_writes(bus: Office, either: Desk) -> None:
    either.rows("drop table if exists orders; create table orders (id int)")
    producer = bus.session().begin()
    producer.rows("insert into orders values (1)")
    producer.send("order 1")
    assert told(producer.receive()) == ["order 1"]  # one's own are seen, as any row would be
    producer.rollback()
    producer.begin().rows("insert into orders values (2)")
    producer.send("order 2")
    assert either.receive() == []
    producer.commit()
    assert either.drain() == ["order 2"]
    assert either.rows("select id from orders") == [(2,)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_senders_at_every_isolation_level(bus: Office, s: Desk, level: str) -> None:
    """Two of them at a time, into queues of every kind, and a reader beside them.

    SERIALIZABLE leaves out what reads before it writes (bounds, dedupe keys): one of two may have to retry.
    """
    s.queue()
    s.queue("bounded", max_size=100)
    s.queue("keyed")
    s.policy(concurrency=2, of="keyed")
    s.queue("unlogged", unlogged_unsafe=True)
    reads = level == "repeatable read"
    names = ["q", "keyed", "unlogged", *(["bounded"] if reads else [])]
    a, b = bus.session().begin(level), bus.session().begin(level)
    for name in names:
        for x, text in [(a, "a"), (b, "b")]:
            x.send(text, "k", to=name)
            x.send(f"{text} urgent", f"k {text}", to=name, priority=3)
            x.send(f"{text} once", f"l {text}", to=name, dedupe_key=text if reads else None)
        assert s.receive(of=name) == []
    a.commit()
    b.commit()
    for name in names:
        expected = ["a", "a once", "a urgent", "b", "b once", "b urgent"]
        assert sorted(map(str, s.drain(of=name))) == expected


def test_sender_whose_snapshot_is_older_than_the_message_it_follows(bus: Office, one: Desk) -> None:
    old = bus.session().begin("repeatable read")
    one.send("first")
    one.drain()
    old.send("second")
    old.commit()
    assert one.drain() == ["second"]
