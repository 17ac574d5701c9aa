"""Finishing: ack, nack, release, extend and dead_letter, of one message and many, of queues and streams."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from tests.engine.bus import refused
from tests.queue.work import KINDS, VERBS, Desk, Office, told


def test_ack_one_and_many(kind: Desk) -> None:
    kind.send_many(5)
    receipts = [m.receipt for m in kind.receive()]
    assert kind.ack(receipts[0]) == 1
    assert kind.ack(*receipts[1:4]) == 3
    assert kind.sizes() == (0, 0, 1)
    assert kind.value("select postbus.ack('{}'::text[])") == 0
    assert kind.ack(receipts[4], receipts[4]) == 1  # named twice, done once
    assert kind.sizes() == (0, 0, 0)


def test_nack_comes_back_at_once_or_later(bus: Office, kind: Desk) -> None:
    kind.send_many(3)
    a, b, c = (m.receipt for m in kind.receive())
    assert kind.value("select postbus.nack(%s::text, '0')", a) == 1
    assert kind.give_back(b, c, delay=10, reason="not yet") == 2
    assert [(m.payload, m.attempt) for m in kind.receive()] == [("m1", 2)]
    assert {(p["payload"], p["reason"]) for p in kind.peek("delayed")} == {
        ("m2", "not yet"),
        ("m3", "not yet"),
    }
    bus.wait(9.9)
    assert kind.receive() == []
    bus.wait(0.1)
    assert [(m.payload, m.attempt) for m in kind.receive()] == [("m2", 2), ("m3", 2)]


def test_nack_without_a_delay_backs_off(bus: Office, s: Desk) -> None:
    """Doubled each time up to the bound, spread by a quarter."""
    s.queue(backoff="8 seconds", max_backoff="20 seconds", max_attempts=10)
    s.send("a")
    for expected in [8, 16, 20, 20]:
        (m,) = s.receive()
        s.give_back(m.receipt, delay=None)
        due = s.value("select due from postbus.peek('q')")
        assert 0.75 * expected <= (due - bus.now).total_seconds() <= 1.25 * expected
        bus.wait(26)


def test_nack_with_a_negative_delay_is_now(bus: Office, kind: Desk) -> None:
    kind.send("a")
    kind.give_back(kind.receive()[0].receipt, delay=-5)
    assert kind.value("select due from postbus.peek('q')") == bus.now
    assert told(kind.receive()) == ["a"]


def test_nack_after_the_last_attempt(kind: Desk) -> None:
    kind.alter_queue(max_attempts=2)
    kind.send("a")
    kind.give_back(kind.receive()[0].receipt, reason="first")
    assert kind.letters() == []
    kind.give_back(kind.receive()[0].receipt, reason="second", delay=60)
    assert kind.letters() == [("a", 2, "second")]
    assert kind.sizes() == (0, 0, 0)


def test_dead_letter_one_and_many(kind: Desk) -> None:
    kind.send_many(3)
    a, b, c = (m.receipt for m in kind.receive())
    assert kind.value("select postbus.dead_letter(%s::text, 'hopeless')", a) == 1
    assert kind.give_up(b, c) == 2
    assert kind.letters() == [("m1", 1, "hopeless"), ("m2", 1, "given up"), ("m3", 1, "given up")]
    assert kind.sizes() == (0, 0, 0)


def test_extend_moves_the_end_of_the_lease_and_never_shortens_it(bus: Office, kind: Desk) -> None:
    kind.send_many(2)
    a, b = (m.receipt for m in kind.receive(lease="10 seconds"))
    bus.wait(5)
    assert kind.value("select postbus.extend(%s::text, '20 seconds')", a) == bus.now + timedelta(seconds=20)
    assert kind.extend(a, lease="1 second") == bus.now + timedelta(seconds=20)
    assert kind.extend(a, b, lease="10 seconds") == bus.now + timedelta(seconds=10)  # the first to end
    assert kind.extend(b) == bus.now + timedelta(seconds=30)  # the lease of the queue
    bus.wait(19.9)
    assert kind.receive() == []
    bus.wait(0.1)
    assert told(kind.receive()) == ["m1"]
    for lease in ["0", "-1 minute"]:
        with refused("PB003", "extend needs a lease longer than zero"):
            kind.extend(b, lease=lease)


def test_a_lease_that_ended_is_good_until_somebody_else_has_it(bus: Office, kind: Desk) -> None:
    kind.send_many(4)
    receipts = [m.receipt for m in kind.receive()]
    bus.wait(60)
    kind.ack(receipts[0])
    kind.give_back(receipts[1], delay=60)
    kind.extend(receipts[2])
    kind.give_up(receipts[3])
    assert kind.receive() == []


@pytest.mark.parametrize("verb", VERBS)
def test_streams_and_queues_of_every_kind_in_one_array(s: Desk, verb: str) -> None:
    s.stream()
    s.group(ordering="none", backoff=0)
    for kind in KINDS:
        s.queue(kind, unlogged_unsafe=kind == "unlogged", on_ack="archive" if kind == "archive" else "delete")
        s.send(kind, "k", to=kind)
    s.policy(of="keyed", concurrency=1)
    s.fill(2)
    batch = s.consume()
    work = [s.receive(of=kind)[0] for kind in KINDS]
    receipts = [batch[0].receipt, *(m.receipt for m in work), batch[1].receipt]
    before = s.everything()
    for wrong in ["s9999999:1", f"q{10**6}{receipts[1][receipts[1].index(':') :]}"]:
        with refused("PB004", "Nothing was changed"):
            s.finish(verb, *receipts, wrong)
        assert s.everything() == before
    done = s.finish(verb, *receipts)
    if verb == "extend":
        assert done is not None
        return
    assert done == len(receipts)
    again = [m.payload for kind in KINDS for m in s.receive(of=kind)]
    assert again == (KINDS if verb in {"nack", "release"} else [])
    assert len(s.rows("select * from postbus.dead_letter")) == (len(receipts) if verb == "dead_letter" else 0)


def test_finishing_is_part_of_the_transaction(bus: Office, kind: Desk) -> None:
    kind.send_many(4)
    page = kind.receive()
    kind.begin()
    kind.ack(page[0].receipt)
    kind.give_back(page[1].receipt)
    kind.give_up(page[2].receipt)
    kind.extend(page[3].receipt, lease="1 day")
    kind.rollback()
    assert kind.sizes() == (0, 0, 4)
    assert kind.letters() == []
    bus.wait(30)
    assert len(kind.receive()) == 4


def test_two_that_finish_at_once(bus: Office, kind: Desk) -> None:
    """The second waits for the first, and has lost if that one commits."""
    kind.send_many(2)
    page = kind.receive()
    other = bus.session()
    kind.begin().ack(page[0].receipt)

    def second() -> int:
        return other.give_back(page[0].receipt, page[1].receipt)

    with bus.blocked(other, second) as result:
        kind.commit()
    with pytest.raises(psycopg.Error, match="lease lost"):
        result.result()
    assert told(kind.receive()) == []
    assert kind.ack(page[1].receipt) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_a_stale_snapshot_cannot_finish(bus: Office, one: Desk, verb: str) -> None:
    one.send("a")
    (m,) = one.receive()
    old = bus.session().begin("repeatable read")
    bus.wait(60)
    (again,) = one.receive()
    with pytest.raises(psycopg.errors.SerializationFailure):
        old.finish(verb, m.receipt)
    old.rollback()
    assert one.ack(again.receipt) == 1
