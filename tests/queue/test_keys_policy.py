"""Key policies: default and overrides, changes that count at once, messages from before, keys that vanish."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.bus import refused
from tests.queue.work import VERBS, Desk, Office, told


def policies(s: Desk) -> list[tuple[Any, ...]]:
    query = "select key, concurrency, rate, burst, max_size, weight from postbus.list_key_policies('q')"
    return s.rows(query)


def unset(s: Desk, key: str | None = None) -> None:
    s.rows("select postbus.unset_key_policy('q', %s)", key)


def test_list(one: Desk) -> None:
    one.queue("other")
    one.policy("x", of="other", weight=2)
    assert policies(one) == []
    assert one.look()["key_policies"] == 0
    one.policy(concurrency=2, rate=1.5, max_size=9)
    one.policy("k", rate=3, burst=7, weight=5)
    assert policies(one) == [(None, 2, 1.5, 2, 9, 1), ("k", None, 3.0, 7, None, 5)]
    one.policy("k", concurrency=1)
    assert policies(one) == [(None, 2, 1.5, 2, 9, 1), ("k", 1, None, None, None, 1)]
    unset(one, "k")
    unset(one)
    assert policies(one) in ([], [(None, None, None, None, None, 1)])
    assert (
        one.value("select count(*) from postbus.list_key_policies() where queue = 'other' and key = 'x'") == 1
    )


@pytest.mark.parametrize(
    ("limits", "saying"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"rate": 0}, "rate must be above 0"),
        ({"rate": -1}, "rate must be above 0"),
        ({"rate": float("nan")}, "rate must be above 0"),
        ({"rate": float("inf")}, "rate must be above 0"),
        ({"rate": 1, "burst": 0}, "burst must be at least 1"),
        ({"burst": 3}, "burst goes with a rate"),
        ({"max_size": 0}, "max_size must be at least 1"),
        ({"weight": 0}, "weight must be from 1 to 1000"),
        ({"weight": 1001}, "weight must be from 1 to 1000"),
        ({"weight": None}, "weight must be from 1 to 1000"),
    ],
)
def test_refusals(one: Desk, limits: dict[str, Any], saying: str) -> None:
    for key in [None, "k"]:
        with refused("PB003", f"key policy of queue 'q': {saying}"):
            one.policy(key, **limits)
    assert policies(one) == []


def test_refusals_by_state(one: Desk) -> None:
    one.queue("u", unlogged_unsafe=True)
    with refused("PB003", "queue 'u' is unlogged"):
        one.policy(of="u", concurrency=1)
    with refused("PB001", "key 'k' of queue 'q' has no policy of its own"):
        unset(one, "k")


def test_override_replaces_the_default_as_a_whole(one: Desk) -> None:
    one.policy(concurrency=1)
    one.policy("open", weight=2)  # and no limit
    one.policy("two", concurrency=2)
    for key in ["plain", "open", "two"]:
        one.send_many(4, key=key)
    got: dict[str | None, int] = {}
    for _ in range(3):
        for m in one.receive():
            got[m.key] = got.get(m.key, 0) + 1
    assert got == {"plain": 1, "open": 4, "two": 2}


@pytest.mark.parametrize("key", [None, "a"])
def test_more_places_count_at_once(one: Desk, key: str | None) -> None:
    one.policy(concurrency=1)
    one.send_many(6, key="a")
    assert told(one.receive()) == ["m1"]
    assert one.receive() == []
    one.policy(key, concurrency=3)
    assert told(one.receive()) == ["m2", "m3"]
    assert one.receive() == []
    one.policy(key)
    assert told(one.receive()) == ["m4", "m5", "m6"]


@pytest.mark.parametrize("key", [None, "a"])
def test_fewer_places_count_at_once(one: Desk, key: str | None) -> None:
    one.policy(concurrency=3)
    one.send_many(6, key="a")
    page = one.receive()
    one.policy(key, concurrency=1)
    for m in page[:2]:
        one.ack(m.receipt)
        assert one.receive() == []
    one.ack(page[2].receipt)
    assert told(one.receive()) == ["m4"]
    assert one.receive() == []


@pytest.mark.parametrize("key", [None, "a"])
def test_a_new_rate_counts_at_once(one: Desk, key: str | None) -> None:
    one.policy()
    one.send_many(100, key="a")
    assert len(one.receive(10)) == 10
    one.policy(key, rate=0.001, burst=1)
    assert len(one.receive(10)) == 1
    assert one.receive() == []
    one.policy(key)
    assert len(one.receive(50)) == 50


@pytest.mark.parametrize("key", [None, "a"])
def test_a_raised_rate_counts_at_once(bus: Office, one: Desk, key: str | None) -> None:
    one.policy(rate=0.001, burst=1)
    one.send_many(100, key="a")
    assert len(one.receive(10)) == 1
    one.policy(key, rate=10, burst=2)
    bus.wait(1)
    assert 1 <= len(one.receive(50)) <= 2


@pytest.mark.parametrize("key", [None, "a"])
def test_unset_counts_at_once(one: Desk, key: str | None) -> None:
    one.policy(concurrency=None if key else 1)
    if key:
        one.policy(key, concurrency=1)
    one.send_many(3, key="a")
    assert told(one.receive()) == ["m1"]
    assert one.receive() == []
    unset(one, key)
    assert told(one.receive()) == ["m2", "m3"]


def test_unset_of_an_override_gives_the_default_back(one: Desk) -> None:
    one.policy(concurrency=1)
    one.policy("a", concurrency=3)
    one.send_many(6, key="a")
    page = one.receive()
    assert len(page) == 3
    unset(one, "a")
    one.ack(page[0].receipt, page[1].receipt)
    assert one.receive() == []
    one.ack(page[2].receipt)
    assert told(one.receive()) == ["m4"]


def test_a_policy_rolled_back(one: Desk) -> None:
    one.send_many(3, key="a")
    one.begin().policy(concurrency=1)
    one.rollback()
    assert told(one.receive()) == ["m1", "m2", "m3"]
    assert policies(one) == []


# Messages from before there was a policy.


def test_waiting_delayed_and_out_are_adopted(bus: Office, one: Desk) -> None:
    one.send_all("out", "late", "free", keys=["a", "b", None])
    out = {m.payload: m for m in one.receive(lease="10 seconds")}
    one.give_back(out["late"].receipt, delay=5)
    one.send("waits", "a")
    one.send("delayed", "c", delay="5 seconds")
    one.policy(concurrency=1)
    assert one.receive() == []  # out is, and counts
    bus.wait(5)
    assert sorted(map(str, told(one.receive()))) == ["delayed", "late"]
    one.extend(out["free"].receipt, lease="1 hour")
    bus.wait(5)
    assert told(one.receive()) == ["out"]


@pytest.mark.parametrize("verb", VERBS)
def test_receipts_from_before_stay_good(one: Desk, verb: str) -> None:
    one.send_many(2, key="a")
    (m,) = one.receive(1)
    one.policy(concurrency=1)
    one.rows(f"select postbus.{verb}(%s::text)", m.receipt)
    expected = {"nack": [], "extend": [], "release": ["m1"]}
    assert told(one.receive()) == expected.get(verb, ["m2"])


def test_transactions_that_had_not_seen_the_policy(bus: Office, one: Desk) -> None:
    """What they send is adopted by upkeep; until then it waits, so that no limit is passed."""
    late = bus.session().begin("repeatable read")
    one.policy(concurrency=1)
    one.send("first", "a")
    (m,) = one.receive()
    late.send("second", "a")
    late.send("other", "b")
    late.commit()
    assert "second" not in told(one.receive())
    one.maintain()
    one.receive()
    one.ack(m.receipt)
    assert told(one.receive()) == ["second"]


# Keys come and go.


def keys(s: Desk) -> list[str]:
    return [r[0] for r in s.rows("select key from postbus.key_state order by key")]


def test_keys_vanish(bus: Office, one: Desk) -> None:
    one.policy(concurrency=1)
    for key in ["done", "waits", "out"]:
        one.send("x", key)
    for m in one.receive():
        if m.key == "done":
            one.ack(m.receipt)
        elif m.key == "waits":
            one.give_back(m.receipt, delay=3600)
    one.receive()
    assert one.maintain().get("keys") == 1
    assert keys(one) == ["out", "waits"]
    bus.wait(3600)
    assert sorted(map(str, [m.key for m in one.receive()])) == ["out", "waits"]
    # And come again by themselves.
    one.send("again", "done")
    assert told(one.receive()) == ["again"]


def test_a_key_stays_until_its_rate_is_paid_for(bus: Office, one: Desk) -> None:
    """Else a key that is emptied and filled again would get a new burst each time."""
    one.policy(rate=0.1, burst=2)
    one.send_many(2, key="a")
    assert len(one.pop()) == 2
    one.receive()
    one.maintain()
    one.send_many(2, key="a")
    assert one.receive() == []
    bus.wait(10)
    assert len(one.pop()) == 1
    bus.wait(100)
    assert len(one.pop()) == 1
    bus.wait(100)
    one.receive()
    one.maintain()
    assert keys(one) == []


def test_wakes_do_not_pile_up(one: Desk) -> None:
    one.policy(concurrency=1)
    for i in range(200):
        one.send("x", f"k{i % 7}")
    one.drain()
    one.receive()
    assert one.value("select count(*) from postbus.key_wake") == 0
