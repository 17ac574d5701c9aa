"""Limits of keys: so many at once, so many a second, turns by weight; nobody starves."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.queue.work import Desk, Office, Work, told


def by_key(work: list[Work]) -> Counter[str | None]:
    return Counter(m.key for m in work)


# At once.


def test_so_many_at_once(bus: Office, one: Desk) -> None:
    one.policy(concurrency=3)
    one.send_many(7, key="a")
    first = one.receive(lease="10 seconds")
    assert told(first) == ["m1", "m2", "m3"]
    assert one.receive() == []
    one.ack(first[1].receipt)
    assert told(one.receive()) == ["m4"]
    one.give_back(first[0].receipt)
    assert told(one.receive()) == ["m1"]
    bus.wait(10)
    assert told(one.receive()) == ["m3"]  # its lease ended; m1 and m4 have theirs
    assert one.receive() == []


def test_a_nacked_message_takes_no_place_while_it_waits(bus: Office, one: Desk) -> None:
    one.policy(concurrency=2)
    one.send_many(4, key="a")
    m1, m2 = one.receive()
    one.give_back(m1.receipt, delay=10)
    assert told(one.receive()) == ["m3"]
    one.ack(m2.receipt)
    (m4,) = one.receive()
    bus.wait(10)
    assert one.receive() == []  # it is due, and there is no place
    one.ack(m4.receipt)
    assert told(one.receive()) == ["m1"]


def test_places_are_counted_over_all_sessions(bus: Office, one: Desk) -> None:
    one.policy(concurrency=2)
    one.send_many(5, key="a")
    x, y = bus.session(), bus.session()
    assert told(x.receive(1)) == ["m1"]
    assert told(y.receive(5)) == ["m2"]
    assert x.receive() == []


# A second.


def test_rate_with_burst(bus: Office, one: Desk) -> None:
    one.policy(rate=2, burst=3)
    one.send_many(20, key="a")
    assert told(one.receive(lease="1 day")) == ["m1", "m2", "m3"]
    assert one.receive(lease="1 day") == []
    bus.wait(0.4)
    assert one.receive(lease="1 day") == []
    bus.wait(0.1)
    assert told(one.receive(lease="1 day")) == ["m4"]
    assert one.receive(lease="1 day") == []
    bus.wait(1)
    assert told(one.receive(lease="1 day")) == ["m5", "m6"]
    bus.wait(3600)
    assert told(one.receive(lease="1 day")) == ["m7", "m8", "m9"]  # saved up to the burst, not more
    assert one.receive(lease="1 day") == []


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 1), (1, 1), (2.5, 3), (40, 40)])
def test_burst_is_that_of_a_second_by_default(bus: Office, one: Desk, rate: float, burst: int) -> None:
    one.policy(rate=rate)
    one.send_many(100, key="a")
    assert len(one.receive()) == burst
    assert one.receive() == []
    bus.wait(1.001 / rate)
    assert len(one.receive()) == 1


def test_rate_over_a_long_time(bus: Office, one: Desk) -> None:
    """Polled at odd times, never more than burst + rate * time, and all of it in the end."""
    one.policy(rate=5, burst=2)
    one.send_many(60, key="a")
    got = 0
    for step in range(200):
        got += len(one.pop(1 + step % 3))
        assert got <= 2 + 5 * 0.083 * step + 1e-6
        bus.wait(0.083)
    assert got == 60


def test_rate_counts_deliveries_whatever_becomes_of_them(bus: Office, one: Desk) -> None:
    one.policy(rate=1, burst=1)
    one.send_many(2, key="a")
    (m,) = one.receive()
    one.give_back(m.receipt)
    assert one.receive() == []
    bus.wait(1)
    assert len(one.receive()) == 1


@pytest.mark.parametrize("why", ["expired", "poison"])
def test_what_is_buried_costs_no_rate(bus: Office, one: Desk, why: str) -> None:
    one.policy(rate=1, burst=1)
    one.send("bad", "a", ttl="1 second" if why == "expired" else None)
    if why == "poison":
        one.alter_queue(max_attempts=1)
        one.receive(lease="1 second")
    bus.wait(10)
    one.send("good", "a")
    assert told(one.receive()) == ["good"]


def test_rate_and_places_together(bus: Office, one: Desk) -> None:
    one.policy(concurrency=2, rate=1, burst=5)
    one.send_many(6, key="a")
    m1, _ = one.receive(lease="1 hour")
    assert one.receive() == []
    one.ack(m1.receipt)
    assert told(one.receive(lease="1 hour")) == ["m3"]
    assert one.receive() == []


def test_each_key_has_its_own_rate(one: Desk) -> None:
    one.policy(rate=1, burst=1)
    one.policy("fast", rate=10)
    for key in ["a", "b", "fast"]:
        one.send_many(12, key=key)
    got = by_key(one.receive()) + by_key(one.receive())
    assert got == {"a": 1, "b": 1, "fast": 10}


def test_a_claim_rolled_back_gives_its_tokens_back(bus: Office, one: Desk) -> None:
    one.policy(rate=1, burst=2)
    one.send_many(5, key="a")
    other = bus.session().begin()
    assert len(other.receive()) == 2
    other.rollback()
    assert len(one.receive()) == 2
    assert one.receive() == []


# In turns.


def test_several_keys_in_one_call(one: Desk) -> None:
    one.policy()
    for i in range(20):
        one.send_many(10, key=f"k{i:02}")
    first = one.receive(20)
    assert by_key(first) == {f"k{i:02}": 1 for i in range(20)}
    assert {m.payload for m in first} == {"m1"}
    assert set(by_key(one.receive(200)).values()) == {9}


def test_a_key_with_a_large_backlog_does_not_delay_the_small_ones(bus: Office, one: Desk) -> None:
    one.policy()
    one.send_many(1000, key="large")
    order: list[str | None] = []
    for i in range(5):
        bus.wait(1)
        one.send(f"small {i}", f"small {i}")
        for _ in range(3):
            bus.wait(0.01)
            order += [m.key for m in one.receive(1)]
    for i in range(5):
        assert f"small {i}" in order[3 * i : 3 * i + 2], order


@pytest.mark.parametrize("max", [1, 2, 4, 10])
def test_equal_keys_get_equal_shares(bus: Office, one: Desk, max: int) -> None:
    one.policy()
    for key in ["a", "b"]:
        one.send_many(100, key=key)
    got: Counter[str | None] = Counter()
    while got.total() < 80:
        bus.wait(0.01)
        got += by_key(one.receive(max))
    assert abs(got["a"] - got["b"]) <= max


@pytest.mark.parametrize("max", [4, 8, 40])
def test_weight(bus: Office, one: Desk, max: int) -> None:
    """Three times the weight, about three times the share; and the light one is never left out for long."""
    one.policy("heavy", weight=3)
    for key in ["heavy", "light"]:
        one.send_many(300, key=key)
    got: Counter[str | None] = Counter()
    while got.total() < 160:
        bus.wait(0.01)
        got += by_key(one.receive(max))
    assert 2 <= got["heavy"] / (got["light"] or 0.01) <= 4, got


def test_blocked_keys_hide_nobody(one: Desk) -> None:
    """More of them than are looked at in one go."""
    one.policy(concurrency=1)
    one.rows(
        "select postbus.send_batch('q', array(select 'x' from generate_series(1, 600)),"
        " keys => array(select 'k' || i % 300 from generate_series(1, 600) i))"
    )
    assert len(one.receive(1000)) == 300
    one.send("free", "zz")
    assert told(one.receive(1)) == ["free"]


def test_keyed_and_free_messages_do_not_starve_each_other(one: Desk) -> None:
    one.policy()
    one.send_many(200)
    one.send_many(200, key="k")
    seen = by_key([m for _ in range(60) for m in one.receive(2)])
    assert seen["k"] > 10
    assert seen[None] > 10
