"""Payloads through the database: typed, binary, sent by SQL, and unreadable."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from postbus import BadArgument, Bus
from postbus.serializers import Bytes, MsgPack, Text
from tests.client.conftest import fail, opened, raises, transaction
from tests.conftest import Database


@dataclass
class Email:
    to: str
    copies: int = 0


def test_typed_queue_and_stream(bus: Bus) -> None:
    queue = bus.queue("emails", Email, create=True)
    queue.send(Email("a"))
    queue.send_batch([Email("b", 1), Email("c", 2)])
    assert [m.payload for m in queue.receive(max=10)] == [Email("a"), Email("b", 1), Email("c", 2)]
    stream = bus.stream("events", Email, create=True)
    group = stream.group("all")
    stream.publish(Email("d"))
    stream.publish_batch([Email("e")])
    assert [m.payload for m in group.consume()] == [Email("d"), Email("e")]


@pytest.mark.parametrize(
    ("serializer", "value"),
    [(MsgPack(), {"a": b"\0"}), (Text(), "no \\ JSON"), (Bytes(), b"\0\xff")],
    ids=["msgpack", "text", "bytes"],
)
def test_serializers(bus: Bus, serializer: Any, value: Any) -> None:
    queue = bus.queue("emails", create=True, serializer=serializer)
    queue.send(value)
    queue.send(value, headers={"h": 1})
    queue.send_batch([value, value], headers={"h": 1})
    found = queue.receive(max=10).messages
    assert [m.payload for m in found] == [value] * 4
    assert {m.headers["content-type"] for m in found} == {serializer.content_type}
    # Others know from the header what it is.
    queue.send(value)
    assert [m.payload for m in bus.queue("emails").receive()] == [value]


def test_serializer_of_the_bus(kind: str, db: Database) -> None:
    with opened(kind, db.dsn, serializer=Text()) as bus:
        queue = bus.queue("emails", create=True)
        queue.send("a b")
        assert [m.payload for m in queue.receive()] == ["a b"]
        assert db.connect().execute("select postbus.send('emails', 'sql')").fetchone() is not None
        assert [m.payload for m in queue.receive()] == ["sql"]


def test_batch_of_text_and_bytes(bus: Bus) -> None:
    class Both:
        content_type = "x/both"

        def dumps(self, value: Any, /) -> Any:
            return value

        def loads(self, data: Any, model: Any, /) -> Any:
            return data

    queue = bus.queue("emails", create=True, serializer=Both())
    with pytest.raises(BadArgument, match=r"text and of bytes(.|\n)*two batches"):
        queue.send_batch(["a", b"b"])


def test_sent_by_sql(bus: Bus, db: Database) -> None:
    queue = bus.queue("emails", create=True)
    conn = db.connect()
    for payload in ("'{\"a\": 1}'::jsonb", "'[1, 2]'", r"'\x00ff'::bytea", "'null'::jsonb"):
        conn.execute(f"select postbus.send('emails', {payload})".encode())
    assert [m.payload for m in queue.messages(wait=0)] == [{"a": 1}, [1, 2], b"\0\xff", None]


def header(content_type: str) -> str:
    return f"""headers => '{{"content-type": "{content_type}"}}'"""


BAD = [
    ("'not json'", "not readable as application/json: JSON is malformed"),
    ("'{\"to\": 1}'", "Expected `str`, got `int` - at `$.to`"),
    (f"'{{}}', {header('application/xml')}", "content type 'application/xml'"),
    (f"'\\xff'::bytea, {header('application/json')}", "application/json"),
]


def send_bad_and_good(db: Database, call: str) -> None:
    conn = db.connect()
    for payload, _ in BAD:
        conn.execute(f"select {call}, {payload})".encode())
        conn.execute(f"""select {call}, '{{"to": "x"}}')""".encode())


@pytest.mark.parametrize("way", ["messages", "batches", "receive", "listed", "pop"])
def test_unreadable_ones_become_dead_letters(
    bus: Bus, db: Database, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = bus.queue("emails", Email, create=True)
    send_bad_and_good(db, "postbus.send('emails'")
    with caplog.at_level(logging.WARNING, "postbus"):
        if way == "messages":
            found = [m.payload for m in queue.messages(wait=0)]
        elif way == "batches":
            found = [m.payload for batch in queue.batches(wait=0) for m in batch]
        elif way == "receive":
            found = [m.payload for m in queue.receive(max=20)]
        elif way == "listed":
            batch = queue.receive(max=20)
            assert len(batch) == 4
            found = [m.payload for m in batch.messages]
            bus.ack(batch.messages)
        else:
            found = [m.payload for m in queue.pop(max=20)]
    assert found == [Email("x")] * 4
    letters = queue.dead_letters()
    assert len(letters) == 4
    for letter, (_, reason) in zip(letters, BAD, strict=True):
        assert reason in letter.reason
        assert any(f"message {letter.id} goes to the dead letters" in text for text in caplog.messages)
    assert [letter.payload for letter in letters] == ["not json", '{"to": 1}', "{}", b"\xff"]
    assert queue.peek() == []


@pytest.mark.parametrize("way", ["messages", "consume"])
def test_unreadable_events_become_dead_letters(bus: Bus, db: Database, way: str) -> None:
    group = bus.stream("events", Email, create=True).group("all", ordering="stream")
    send_bad_and_good(db, "postbus.publish('events'")
    found = group.messages(wait=0) if way == "messages" else group.consume()
    assert [m.payload for m in found] == [Email("x")] * 4
    letters = group.dead_letters()
    assert [letter.group for letter in letters] == ["all"] * 4
    for letter, (_, reason) in zip(letters, BAD, strict=True):
        assert reason in letter.reason
    assert len(group.consume()) == 0


def test_unreadable_in_a_transaction_of_the_callers(bus: Bus, db: Database) -> None:
    queue = bus.queue("emails", Email, create=True)
    send_bad_and_good(db, "postbus.send('emails'")
    with raises(ZeroDivisionError), transaction(bus, db.dsn) as conn:
        assert len(queue.receive(max=20, conn=conn)) == 4
        fail()
    assert queue.dead_letters() == []
    with transaction(bus, db.dsn) as conn:
        assert [m.payload for m in queue.receive(max=20, conn=conn)] == [Email("x")] * 4
    assert len(queue.dead_letters()) == 4
    assert queue.peek() == []


def test_reasons_that_the_database_does_not_take_as_they_are(bus: Bus, db: Database) -> None:
    class Odd:
        content_type = "x/odd"

        def dumps(self, value: Any, /) -> str:
            return str(value)

        def loads(self, data: Any, model: Any, /) -> Any:
            raise ValueError("\0 \udc80 " + "x" * 10_000)

    queue = bus.queue("emails", create=True, serializer=Odd())
    queue.send(1)
    assert list(queue.messages(wait=0)) == []
    [letter] = queue.dead_letters()
    assert "\\0 \\udc80 xxx" in letter.reason
    assert len(letter.reason) < 3000


def test_peek_shows_what_cannot_be_read(bus: Bus, db: Database) -> None:
    queue = bus.queue("emails", Email, create=True)
    queue.send(Email("a"), key="k", priority=1)
    db.connect().execute("select postbus.send('emails', 'not json')")
    one, two = sorted(queue.peek(), key=lambda m: m.id)
    assert (one.payload, one.key, one.attempt) == (Email("a"), "k", 0)
    assert two.payload == "not json"
    assert queue.peek(id=2)[0].payload == "not json"
    assert [m.id for m in queue.peek(key="k")] == [1]


def test_redrive(bus: Bus) -> None:
    queue = bus.queue("emails", create=True)
    queue.send_batch([1, 2, 3])
    for m in queue.receive(max=3).messages:
        m.dead_letter("because")
    letters = queue.dead_letters()
    assert [(d.payload, d.reason, d.attempt) for d in letters] == [(n, "because", 1) for n in (1, 2, 3)]
    assert [d.id for d in queue.dead_letters(max=1, after=letters[0].letter)] == [2]
    assert queue.redrive(letters[0]) == 1
    assert queue.redrive([letters[1].letter]) == 1
    assert queue.redrive() == 1
    assert sorted(m.payload for m in queue.receive(max=10)) == [1, 2, 3]


def test_redrive_of_a_group(bus: Bus) -> None:
    stream = bus.stream("orders", create=True)
    one, two = stream.group("one"), stream.group("two")
    stream.publish_batch([1, 2])
    for group in (one, two):
        for m in group.consume().messages:
            m.dead_letter("because")
    assert one.redrive([d for d in one.dead_letters() if d.payload == 2]) == 1
    assert [m.payload for m in one.consume()] == [2]
    assert len(two.consume()) == 0
    assert two.redrive() == 2
