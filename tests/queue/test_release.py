"""Release: what was taken but not begun is as if it had not been taken."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.conftest import Database
from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told


def test_one_and_many(kind: Desk) -> None:
    kind.send_many(5)
    a, *others = (m.receipt for m in kind.receive())
    assert kind.value("select postbus.release(%s::text)", a) == 1
    assert kind.release(*others, others[0]) == 4  # named twice, done once
    assert kind.release() == 0
    assert kind.sizes() == (5, 0, 0)
    assert [(m.payload, m.attempt) for m in kind.receive()] == [(f"m{i}", 1) for i in range(1, 6)]


def test_never_too_often(bus: Office, kind: Desk) -> None:
    """An attempt that was released does not count; those before it do."""
    kind.alter_queue(max_attempts=2)
    kind.send("a")
    for _ in range(5):
        (m,) = kind.receive()
        assert m.attempt == 1
        kind.release(m.receipt)
    kind.die()
    for _ in range(5):
        (m,) = kind.receive()
        assert m.attempt == 2
        kind.release(m.receipt)
    assert kind.letters() == []
    kind.give_back(kind.receive()[0].receipt, reason="no good")
    assert kind.letters() == [("a", 2, "no good")]


def test_reason_and_state_stay(kind: Desk) -> None:
    kind.send("a", headers='{"h": 1}')
    kind.give_back(kind.receive()[0].receipt, reason="interrupted", state={"page": 3})
    (m,) = kind.receive()
    kind.release(m.receipt)
    (p,) = kind.peek()
    assert (p["state"], p["reason"], p["saved"], p["worker"]) == ("ready", "interrupted", {"page": 3}, None)
    (again,) = kind.receive()
    assert (again.state, again.created_at, again.headers, again.attempt) == (
        {"page": 3}, m.created_at, {"h": 1}, 2,
    )  # fmt: skip


def test_the_old_receipt_is_worth_nothing(kind: Desk) -> None:
    """Not while the message waits, not when it is out again, and not on the page where it was."""
    kind.send("a")
    (old,) = kind.receive()
    kind.release(old.receipt)
    for _ in range(2):
        before = kind.everything()
        with refused("PB004", "Nothing was changed"):
            kind.release(old.receipt)
        with refused("PB004", "Nothing was changed"):
            kind.ack(old.receipt)
        assert kind.everything() == before
        again = kind.receive()
    assert kind.ack(*(m.receipt for m in again)) == 0
    assert kind.sizes() == (0, 0, 1)


def test_after_a_heartbeat_and_after_the_end_of_the_lease(bus: Office, kind: Desk) -> None:
    kind.send_many(2)
    a, b = (m.receipt for m in kind.receive())
    kind.extend(a)
    bus.wait(60)
    assert kind.release(a, b) == 2
    assert [(m.payload, m.attempt) for m in kind.receive()] == [("m1", 1), ("m2", 1)]


def test_in_front_of_what_came_later(bus: Office, kind: Desk) -> None:
    for i in range(6):
        kind.send(f"m{i}", "k")
        bus.wait(1)
    taken = kind.receive(2)
    assert told(taken) == ["m0", "m1"]
    bus.wait(1)
    kind.release(taken[1].receipt)
    bus.wait(1)
    kind.release(taken[0].receipt)
    assert kind.drain() == [f"m{i}" for i in range(6)]


def test_a_delayed_message_is_due_at_once(bus: Office, kind: Desk) -> None:
    kind.send("later", delay="10 seconds")
    bus.wait(10)
    (m,) = kind.receive()
    kind.release(m.receipt)
    assert kind.value("select postbus.next_due('q')") <= bus.now
    assert told(kind.receive()) == ["later"]


def test_an_expired_message_is_not_delivered(bus: Office, kind: Desk) -> None:
    kind.send("short", ttl="10 seconds")
    (m,) = kind.receive(lease="1 minute")
    bus.wait(11)
    kind.release(m.receipt)
    assert kind.receive() == []
    assert kind.look()["expired"] == 1


def test_can_be_cancelled(kind: Desk) -> None:
    id_ = kind.send("a", "k")
    kind.release(kind.receive()[0].receipt)
    assert kind.value("select postbus.cancel('q', %s)", id_) is True
    assert kind.sizes() == (0, 0, 0)


def test_is_part_of_the_transaction(kind: Desk) -> None:
    kind.send("a")
    (m,) = kind.receive()
    kind.begin().release(m.receipt)
    kind.rollback()
    assert kind.receive() == []
    assert kind.ack(m.receipt) == 1


# Where claims begin to read at a mark.


@pytest.mark.parametrize("levels", [1, 2])
def test_not_behind_the_mark(db: Database, levels: int) -> None:
    """Claims begin where the backlog does; what is released is not left behind for the next whole read."""
    s = Office(db).session()
    s.queue(lease="1 hour")
    if levels > 1:
        s.send("urgent", priority=5)
        s.drain()
    s.send_many(2)
    bus = s.bus
    bus.wait(5)
    s.send_many(2)
    first = s.receive(2)
    # As claims do that have walked far: the head is in ms, and the whole range is to be read in five seconds.
    mark = bus.now - timedelta(seconds=1)
    if levels == 1:
        s.rows(
            "select setval(head, ((extract(epoch from %s::timestamptz) * 1000)::bigint << 20)"
            " | postbus._next_scan(1)) from postbus.queue",
            mark,
        )
        s.rows("select set_config('postbus.whole_' || id, '1', false) from postbus.queue")
    else:
        s.rows("select postbus._set_bits(register, 1024, 0) from postbus.queue")
        s.rows(
            "insert into postbus.mark select id, l, 1, %s, %s from postbus.queue, unnest('{0,5}'::int[]) l",
            *(mark, bus.now + timedelta(hours=1)),
        )
    s.release(*(m.receipt for m in first))
    assert sorted(map(str, told(s.receive(3)))) == ["m1", "m1", "m2"]


# Keys.


@pytest.mark.parametrize("places", [1, 2, None])
def test_a_key_goes_on_with_what_was_released(bus: Office, one: Desk, places: int | None) -> None:
    one.policy(concurrency=places)
    for i in range(1, 6):
        one.send(f"a{i}", "a")
    seen = []
    for _ in range(3):
        page = one.receive(2)
        assert one.receive() == [] or places is None
        seen += [told(page)]
        bus.wait(1)
        for m in reversed(page):
            one.release(m.receipt)
    assert seen[0][0] == "a1"
    assert seen[1:] == seen[:-1] or places is None
    bus.wait(60)
    assert one.drain(2) == [f"a{i}" for i in range(1, 6)]


def test_only_the_key_that_was_released_goes_on(one: Desk) -> None:
    one.policy(concurrency=1)
    one.send_all("a1", "b1", "a2", "b2", keys=["a", "b", "a", "b"])
    page = {m.key: m.receipt for m in one.receive()}
    one.release(page["a"])
    assert told(one.receive()) == ["a1"]


def test_a_released_place_is_one_place(one: Desk) -> None:
    one.policy(concurrency=2)
    for i in range(1, 6):
        one.send(f"a{i}", "a")
    first, second = one.receive(2)
    one.release(second.receipt)
    assert told(one.receive()) == ["a2"]
    assert one.receive() == []
    one.ack(first.receipt)
    assert told(one.receive()) == ["a3"]


def test_the_rate_is_not_paid_back(bus: Office, one: Desk) -> None:
    one.policy(rate=1, burst=1)
    one.send_many(2, key="a")
    one.release(*(m.receipt for m in one.receive()))
    assert one.receive() == []
    bus.wait(1)
    assert told(one.receive()) == ["m1"]


def test_a_message_from_before_the_policy(one: Desk) -> None:
    """It was taken without a place: it comes before the later ones of its key all the same."""
    for i in range(1, 4):
        one.send(f"a{i}", "a")
    (m,) = one.receive(1)
    one.policy(concurrency=1)
    one.release(m.receipt)
    assert told(one.receive()) == ["a1"]
    assert one.receive() == []


# The default lease.


def test_default_lease(s: Desk) -> None:
    s.queue(lease="7 seconds")
    s.queue("u", unlogged_unsafe=True)
    s.stream()
    s.group(lease="9 seconds")
    assert s.value("select postbus.default_lease('q')") == timedelta(seconds=7)
    assert s.value("select postbus.default_lease('u')") == timedelta(seconds=30)
    assert s.value("select postbus.default_lease('s', 'g')") == timedelta(seconds=9)
    s.alter_queue(lease="8 seconds")
    assert s.value("select postbus.default_lease(name => 'q')") == timedelta(seconds=8)


@pytest.mark.parametrize(
    ("call", "saying"),
    [
        ("'nope'", "queue 'nope' does not exist"),
        ("'s'", "'s' is a stream"),
        ("'nope', 'g'", "stream 'nope' does not exist"),
        ("'s', 'nope'", "stream 's' has no group 'nope'"),
        ("null", "does not exist"),
    ],
)
def test_no_default_lease(s: Desk, call: str, saying: str) -> None:
    s.stream()
    with refused("PB001", saying):
        s.rows(f"select postbus.default_lease({call})")
