"""Messages that kill their workers: they end in the dead letters, and stand in nobody's way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.queue.work import Desk, Office, told


def test_worker_that_dies_again_and_again(kind: Desk) -> None:
    """Without a sweeper: the claim after the last one buries it."""
    kind.alter_queue(max_attempts=3)
    number = kind.send("poison", "k")
    assert kind.die(times=3) == 3
    assert kind.letters() == []
    assert kind.receive() == []
    assert kind.letters() == [("poison", 3, "lease expired")]
    assert kind.rows("select event_id, key from postbus.dead_letters('q')") == [(number, "k")]
    assert kind.sizes() == (0, 0, 0)


def test_the_reason_is_that_of_the_last_nack(kind: Desk) -> None:
    kind.alter_queue(max_attempts=2)
    kind.send("poison")
    kind.give_back(kind.receive()[0].receipt, reason="boom")
    kind.die()
    assert kind.receive() == []
    assert kind.letters() == [("poison", 2, "boom")]


def test_what_is_behind_poison_comes_in_the_same_call(kind: Desk) -> None:
    kind.alter_queue(max_attempts=1)
    kind.send_many(6)
    assert kind.die() == 6
    kind.send_all("good 1", "good 2", "good 3")
    assert told(kind.receive(2)) == ["good 1", "good 2"]
    assert len(kind.letters()) == 6


def test_a_batch_that_was_partly_buried_is_smaller_but_not_empty(kind: Desk) -> None:
    kind.alter_queue(max_attempts=1)
    kind.send_many(5)
    assert kind.die() == 5
    kind.send_all("good 1", "good 2")
    assert told(kind.receive(2))[:1] == ["good 1"]
    assert len(kind.letters()) == 5


def test_poison_and_good_ones_mixed_in_one_batch(bus: Office, kind: Desk) -> None:
    kind.alter_queue(max_attempts=2)
    kind.send_all("p1", "p2")
    kind.die()
    kind.send_all("g1", "g2")
    bus.wait(1)
    assert kind.die() == 4
    got = kind.drain(10)
    assert got == ["g1", "g2"]
    assert [x[0] for x in kind.letters()] == ["p1", "p2"]


@pytest.mark.parametrize("max", [1, 100])
def test_a_thousand_of_them_hide_nothing(kind: Desk, max: int) -> None:
    kind.alter_queue(max_attempts=1)
    kind.send_many(1000)
    assert kind.die(max=1000) == 1000
    kind.send("good")
    assert told(kind.receive(max)) == ["good"]
    assert kind.look()["dead_letters"] == 1000


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"concurrency": 3}, {}])
def test_poison_in_keys(one: Desk, limit: dict[str, Any]) -> None:
    """The key of a poison message goes on with the next one, at once."""
    one.alter_queue(max_attempts=2)
    one.policy(**limit)
    for i in range(3):
        one.send(f"poison {i}", f"k{i}")
        one.send(f"good {i}", f"k{i}")
    got: set[str | None] = set()
    for _ in range(4):
        for m in one.receive(lease="1 second"):
            if m.payload and m.payload.startswith("good"):
                one.ack(m.receipt)
                got.add(m.payload)
        one.bus.wait(2)
    assert got == {"good 0", "good 1", "good 2"}
    one.receive()
    assert sorted(x[0] for x in one.letters()) == ["poison 0", "poison 1", "poison 2"]
    assert one.sizes() == (0, 0, 0)


def test_burying_rolls_back_with_the_claim(kind: Desk) -> None:
    kind.alter_queue(max_attempts=1)
    kind.send("poison")
    kind.die()
    kind.begin()
    assert kind.receive() == []
    assert len(kind.letters()) == 1
    kind.rollback()
    assert kind.letters() == []
    assert kind.receive() == []
    assert len(kind.letters()) == 1


def test_fewer_attempts_take_effect_at_once(kind: Desk) -> None:
    kind.send("a")
    kind.die(times=2)
    kind.alter_queue(max_attempts=2)
    assert kind.receive() == []
    assert kind.letters() == [("a", 2, "lease expired")]
