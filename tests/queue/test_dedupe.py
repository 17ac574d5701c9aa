"""Deduplication: one message per dedupe_key and window, whatever became of the first."""

from __future__ import annotations

import psycopg
import pytest

from tests.queue.work import Desk, Office


def test_the_second_send_returns_the_first_id(bus: Office, either: Desk) -> None:
    first = either.send("a", dedupe_key="d")
    assert either.send("b", "other key", dedupe_key="d", priority=3, delay="1 hour") == first
    other = either.send("c", dedupe_key="e")
    assert other != first
    assert either.drain() == ["a", "c"]
    # Finished, dead, cancelled: the key still counts.
    assert either.send("again", dedupe_key="d") == first
    assert either.drain() == []


@pytest.mark.parametrize("fate", ["in flight", "nacked", "dead", "cancelled", "popped", "purged"])
def test_states_that_it_covers(one: Desk, fate: str) -> None:
    first = one.send("a", dedupe_key="d")
    if fate == "popped":
        one.pop()
    elif fate == "cancelled":
        one.rows("select postbus.cancel('q', %s)", first)
    elif fate == "purged":
        one.rows("select postbus.purge_queue('q')")
    else:
        (m,) = one.receive()
        if fate == "nacked":
            one.give_back(m.receipt, delay=60)
        elif fate == "dead":
            one.give_up(m.receipt)
    size = sum(one.sizes())
    assert one.send("b", dedupe_key="d") == first
    assert sum(one.sizes()) == size


def test_the_window_ends(bus: Office, s: Desk) -> None:
    s.queue(dedupe_window="10 seconds")
    first = s.send("a", dedupe_key="d")
    bus.wait(9)
    assert s.send("b", dedupe_key="d") == first
    bus.wait(1)  # the window is that of the first, and was not made longer by the second
    second = s.send("c", dedupe_key="d")
    assert second != first
    bus.wait(9)
    assert s.send("d", dedupe_key="d") == second
    assert s.drain() == ["a", "c"]


def test_upkeep_forgets_old_keys_only(bus: Office, s: Desk) -> None:
    s.queue(dedupe_window="10 seconds")
    s.send("a", dedupe_key="old")
    bus.wait(69)
    fresh = s.send("b", dedupe_key="fresh")
    assert "dedupe" not in s.maintain()
    bus.wait(2)
    assert s.maintain()["dedupe"] == 1
    assert s.rows("select dedupe_key from postbus.dedupe") == [("fresh",)]
    assert s.send("c", dedupe_key="fresh") == fresh


def test_queues_and_streams_do_not_share_keys(s: Desk) -> None:
    s.queue("a")
    s.queue("b")
    s.stream()
    assert len({s.send("x", to=q, dedupe_key="d") for q in ["a", "b"]}) == 2
    s.publish("x", dedupe_key="d")
    assert [s.drain(of=q) for q in ["a", "b"]] == [["x"], ["x"]]


def test_twice_in_one_transaction(either: Desk) -> None:
    either.begin()
    first = either.send("a", dedupe_key="d")
    assert either.send("b", dedupe_key="d") == first
    either.commit()
    assert either.drain() == ["a"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_senders_at_once(bus: Office, either: Desk, end: str) -> None:
    """The second waits for the first, and takes over if that one rolls back."""
    a, b = bus.session().begin(), bus.session()
    first = a.send("a", dedupe_key="d")
    with bus.blocked(b, lambda: b.send("b", dedupe_key="d")) as second:
        a.commit() if end == "commit" else a.rollback()
    if end == "commit":
        assert second.result() == first
        assert either.drain() == ["a"]
    else:
        assert second.result() != first
        assert either.drain() == ["b"]


def test_a_stale_snapshot_fails_rather_than_send_twice(bus: Office, one: Desk) -> None:
    b = bus.session().begin("repeatable read")
    one.send("a", dedupe_key="d")
    with pytest.raises(psycopg.errors.SerializationFailure):
        b.send("b", dedupe_key="d")
    b.rollback()
    assert one.drain() == ["a"]


def test_a_send_that_was_refused_leaves_no_key(s: Desk) -> None:
    s.queue(max_size=1)
    s.send("a")
    with pytest.raises(psycopg.Error, match="is full"):
        s.send("b", dedupe_key="d")
    assert s.drain() == ["a"]
    s.send("b", dedupe_key="d")
    assert s.drain() == ["b"]
