"""Receipts that are no longer good for anything: late, used, foreign, forged."""

from __future__ import annotations

import re

import pytest

from tests.engine.bus import refused
from tests.queue.work import VERBS, Desk, Office

GARBAGE = [
    "", "q", "q1", "q1:1", "x1:1:0:1", "q1:1:0:1:1", " q1:1:0:1", "q1:1:0:1 ", "Q1:1:0:1", "q-1:1:0:1",
    "q1:-1:0:1",
    "q:::", "q1:::1", "1", "é", "q1:1:0:1\n", f"s{'9' * 30}", f"k{'9' * 30}:1:0:1",
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_late_receipts_change_nothing(bus: Office, kind: Desk, verb: str) -> None:
    """Neither the message that has another owner now, nor the rest of the array."""
    kind.send("slow")
    (old,) = kind.receive(lease="1 second")
    bus.wait(2)
    (new,) = kind.receive()
    kind.send("good")
    (good,) = kind.receive()
    before = kind.everything()
    for array in [[old], [good, old], [old, good]]:
        with refused("PB004", old.receipt[1:]):
            kind.finish(verb, *(m.receipt for m in array))
        assert kind.everything() == before
    assert kind.ack(new.receipt, good.receipt) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_late_and_good_receipts_of_one_message(bus: Office, one: Desk, verb: str) -> None:
    one.send("slow")
    (old,) = one.receive(lease="1 second")
    bus.wait(2)
    (new,) = one.receive()
    before = one.everything()
    for array in [[old, new], [new, old]]:
        with refused("PB004", old.receipt[1:]):
            one.finish(verb, *(m.receipt for m in array))
        assert one.everything() == before


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("end", ["ack", "nack", "release", "dead_letter", "cancel", "pop", "purge"])
def test_a_receipt_is_good_for_one_end(bus: Office, one: Desk, verb: str, end: str) -> None:
    one.send("a")
    (m,) = one.receive()
    if end in VERBS:
        one.finish(end, m.receipt)
    else:
        bus.wait(60)
        one.rows({
            "cancel": "select postbus.cancel('q', id) from postbus.peek('q')",
            "pop": "select postbus.pop('q')",
            "purge": "select postbus.purge_queue('q')",
        }[end])  # fmt: skip
    before = one.everything()
    with refused("PB004", "Nothing was changed"):
        one.finish(verb, m.receipt)
    assert one.everything() == before


def test_an_old_receipt_stays_dead_after_redrive(kind: Desk) -> None:
    kind.send("a")
    (old,) = kind.receive()
    kind.give_up(old.receipt)
    kind.rows("select postbus.redrive('q')")
    for verb in VERBS:
        with refused("PB004", "lease lost"):
            kind.finish(verb, old.receipt)
    (new,) = kind.receive()
    assert (new.id, new.attempt) == (old.id, 1)
    assert new.receipt != old.receipt
    for verb in VERBS:
        with refused("PB004", "lease lost"):
            kind.finish(verb, old.receipt)
    assert kind.ack(new.receipt) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_foreign_receipts_and_garbage(one: Desk, verb: str) -> None:
    one.queue("u", unlogged_unsafe=True)
    one.send("mine")
    one.send("theirs", to="u")
    (m,) = one.receive()
    (u,) = one.receive(of="u")
    before = one.everything()
    letter, rest = m.receipt[0], m.receipt[1:]
    number, claim, place = re.match(r"(\d+):(\d+)(.*)", rest).groups()  # type: ignore[union-attr]
    for lost in [
        f"{letter}{number}:{int(claim) - 1}{place}", f"{letter}{number}:{int(claim) + 1}{place}",
        f"{letter}{int(number) + 10**6}:{claim}{place}", f"k{int(number) + 10**6}:{claim}{place}",
        f"u{rest}", f"q{u.receipt[1:]}", "s9999999",
    ]:  # fmt: skip
        with refused("PB004", "Nothing was changed"):
            one.finish(verb, lost)
        with refused("PB004", "Nothing was changed"):
            one.finish(verb, m.receipt, lost)
    for garbage in GARBAGE:
        with refused("PB003", f"'{garbage}' is not a receipt"):
            one.finish(verb, garbage)
        with refused("PB003", f"'{garbage}' is not a receipt"):
            one.finish(verb, m.receipt, garbage)
    assert one.everything() == before


@pytest.mark.parametrize("verb", VERBS)
def test_null_receipts(one: Desk, verb: str) -> None:
    with refused("PB003", "is not a receipt"):
        one.rows(f"select postbus.{verb}(array[null]::text[])")
    with refused("PB003"):
        one.rows(f"select postbus.{verb}(null::text)")
    with refused("PB003", "must not be null"):
        one.rows(f"select postbus.{verb}(null::text[])")


def test_part_of_a_batch_is_for_streams(one: Desk) -> None:
    """A receipt of a queue is one message; with ids it would be read as another receipt."""
    one.send("a")
    (m,) = one.receive()
    with refused("PB003"):
        one.rows("select postbus.ack(%s::text, array[1::bigint])", m.receipt)
    assert one.sizes() == (0, 0, 1)


def test_vacuum_keeps_receipts_and_old_ones_stay_old(one: Desk) -> None:
    """Other messages come where finished ones were."""
    one.send_many(50)
    page = one.receive()
    finished, out = page[::2], page[1::2]
    one.ack(*[m.receipt for m in finished])
    one.rows("vacuum postbus.queued")
    one.send_many(50)
    one.receive()
    one.rows("vacuum postbus.queued")
    for m in finished:
        with refused("PB004"):
            one.ack(m.receipt)
    assert one.ack(*[m.receipt for m in out]) == len(out)
    assert one.sizes() == (0, 0, 50)


def test_receipts_of_a_claim_that_was_rolled_back(one: Desk) -> None:
    """They are not those of whoever has the message next."""
    one.send("a")
    one.begin()
    (old,) = one.receive()
    one.rollback()
    (new,) = one.receive()
    assert new.receipt != old.receipt
    with refused("PB004"):
        one.ack(old.receipt)
    assert one.ack(new.receipt) == 1
