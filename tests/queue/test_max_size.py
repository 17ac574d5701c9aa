"""Bounds: a queue or a key that is full refuses with PB006, and has room again when something is finished."""

from __future__ import annotations

import pytest

from tests.engine.bus import refused
from tests.queue.work import Desk, Office


@pytest.fixture(params=["logged", "unlogged"])
def three(request: pytest.FixtureRequest, s: Desk) -> Desk:
    """A queue for three messages."""
    s.queue(max_size=3, unlogged_unsafe=request.param == "unlogged")
    return s


def test_full(three: Desk) -> None:
    three.send("a")
    three.send("b", delay="1 hour")
    three.send("c", priority=2)
    with refused("PB006", "queue 'q' is full: 3 of 3 messages"):
        three.send("d")
    with refused("PB006", "alter_queue"):
        three.send_all("d", "e")
    assert three.send_all() == []
    assert sum(three.sizes()) == 3


@pytest.mark.parametrize("verb", ["ack", "dead_letter", "cancel", "pop", "purge"])
def test_room_after_the_end_of_a_message(three: Desk, verb: str) -> None:
    three.send_many(3)
    if verb in {"ack", "dead_letter"}:
        (m,) = three.receive(1)
        with refused("PB006"):  # out with a worker it still counts
            three.send("no")
        three.rows(f"select postbus.{verb}(%s::text)", m.receipt)
    else:
        call = {
            "cancel": "cancel('q', (select min(id) from postbus.peek('q')))",
            "pop": "pop('q')",
            "purge": "purge_queue('q')",
        }
        three.rows(f"select postbus.{call[verb]}")
    three.send("yes")
    if verb != "purge":
        with refused("PB006"):
            three.send("no")


def test_a_batch_fits_as_a_whole_or_not_at_all(three: Desk) -> None:
    three.send("a")
    with refused("PB006", "queue 'q' is full: 1 of 3"):
        three.send_many(3)
    assert three.sizes() == (1, 0, 0)
    three.send_many(2)
    assert three.sizes() == (3, 0, 0)


def test_ones_own_uncommitted_messages_count(three: Desk) -> None:
    three.begin().send_many(3)
    with refused("PB006"):
        three.send("d")
    three.rollback()
    three.send_many(3)


def test_many_sessions_and_queues_beside_it(bus: Office, three: Desk) -> None:
    """What a session remembers of the room there was is not more than there is."""
    three.queue("other", max_size=5)
    a, b = bus.session(), bus.session()
    a.send("1")
    b.send("2")
    for i in range(5):
        a.send(f"o{i}", to="other")
    b.send("3")
    for x in [a, b, three]:
        with refused("PB006", "'q'"):
            x.send("4")
        with refused("PB006", "'other'"):
            x.send("o6", to="other")
    three.drain()
    assert len([b.send(str(i)) for i in range(3)]) == 3
    with refused("PB006"):
        a.send("4")


def test_a_new_bound_counts_at_once(three: Desk) -> None:
    three.send("a")
    three.alter_queue(max_size=2)
    three.send("b")
    with refused("PB006", "2 of 2"):
        three.send("c")
    three.alter_queue(max_size=4)
    three.send_all("c", "d")
    with refused("PB006", "4 of 4"):
        three.send("e")
    three.alter_queue(max_size=None)
    three.send_many(10)
    three.alter_queue(max_size=1)
    with refused("PB006", "'q'"):
        three.send("f")
    assert len(three.drain()) == 14


def test_a_bound_of_each_key(one: Desk) -> None:
    one.policy(max_size=2)
    one.policy("big", max_size=4)
    one.policy("open")
    for i in range(2):
        one.send(str(i), "a")
        one.send(str(i), "b")
    for i in range(10):
        one.send(str(i))  # without a key
        one.send(str(i), "open")
    with refused("PB006", "key 'a' of queue 'q' is full: 2 of 2 messages"):
        one.send("2", "a")
    with refused("PB006", "key 'big' of queue 'q' is full: 0 of 4 messages"):
        one.send_many(5, key="big")
    one.send_many(4, key="big")
    with refused("PB006", "key 'b'"):
        one.send_all("1", "2", keys=["c", "b"])
    one.send("c has nothing", "c")
    first = next(m for m in one.receive() if m.key == "a")
    with refused("PB006"):
        one.send("2", "a")
    one.ack(first.receipt)
    one.send("2", "a")
    with refused("PB006"):
        one.send("3", "a")


def test_a_new_bound_of_keys_counts_what_was_there_before(one: Desk) -> None:
    one.send_many(3, key="a")
    one.policy(max_size=3)
    with refused("PB006", "3 of 3"):
        one.send("x", "a")
    one.policy(max_size=5)
    one.send("x", "a")
    one.policy("a", max_size=4)
    with refused("PB006", "4 of 4"):
        one.send("y", "a")
    one.rows("select postbus.unset_key_policy('q', 'a')")
    one.send("y", "a")
    with refused("PB006", "5 of 5"):
        one.send("z", "a")
    one.rows("select postbus.unset_key_policy('q')")
    one.send_many(10, key="a")


def test_queue_and_key_together(s: Desk) -> None:
    s.queue(max_size=3)
    s.policy(max_size=2)
    s.send_many(2, key="a")
    with refused("PB006", "key 'a'"):
        s.send("x", "a")
    s.send("x", "b")
    with refused("PB006", "queue 'q' is full"):
        s.send("y", "b")


def test_streams_cannot_push_a_bound_queue_over_its_bound(three: Desk) -> None:
    """A publish that does not fit is refused as a whole: nothing in the queue, nothing in the stream."""
    three.stream()
    three.group()
    three.rows("select postbus.bind('q', stream => 's')")
    three.fill(2)
    with refused("PB006", "'q'"):
        three.fill(2)
    assert three.take() == ["e1", "e2"]
    assert three.drain() == ["e1", "e2"]
