"""Priorities: rank = due - priority * ageing, least first; first in, first out inside a priority."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from tests.queue.work import Desk, Office, told


@pytest.fixture(params=["logged", "unlogged"])
def two(request: pytest.FixtureRequest, s: Desk) -> Desk:
    """Ageing is a minute a level."""
    s.queue(unlogged_unsafe=request.param == "unlogged")
    return s


def test_more_urgent_first_and_in_order_inside_a_priority(two: Desk) -> None:
    two.begin()
    for i in range(12):
        two.send(f"m{i}", priority=i % 3)
    two.commit()
    ranked = [*range(2, 12, 3), *range(1, 12, 3), *range(0, 12, 3)]
    assert two.drain(5) == [f"m{i}" for i in ranked]


def test_waiting_counts_a_minute_a_level(bus: Office, two: Desk) -> None:
    two.send("low")
    bus.wait(119)
    two.send("high early", priority=2)  # as if due at -1 s
    bus.wait(2)
    two.send("high late", priority=2)  # as if due at 1 s
    assert two.drain(1) == ["high early", "low", "high late"]


def test_of_equal_rank_the_more_urgent_one(bus: Office, two: Desk) -> None:
    two.send("zero")
    bus.wait(60)
    two.send("one", priority=1)
    bus.wait(60)
    two.send("two", priority=2)
    assert two.drain(10) == ["two", "one", "zero"]


@pytest.mark.parametrize("ageing", ["00:01:00", "00:00:07", "00:00:00"])
@pytest.mark.parametrize("page", [1, 3, 50])
def test_the_formula(bus: Office, s: Desk, ageing: str, page: int) -> None:
    """Random priorities and times against the formula, with equal ranks by urgency and id."""
    s.queue(ageing=ageing)
    step = {"00:01:00": 60, "00:00:07": 7, "00:00:00": 0}[ageing]
    dice = random.Random(page * 100 + step)
    sent = []
    for i in range(40):
        bus.wait(dice.choice([0, 0, 3, 7, 60]))
        priority = dice.randrange(10)
        number = s.send(f"m{i}", priority=priority)
        sent.append((bus.now - timedelta(seconds=priority * step), -priority, number, f"m{i}"))
    assert s.drain(page) == [x[3] for x in sorted(sent)]


def test_strict_without_ageing(bus: Office, s: Desk) -> None:
    s.queue(ageing=None)
    s.send("low")
    bus.wait(365 * 86400)
    for priority in range(1, 10):
        s.send(f"p{priority}", priority=priority)
    assert s.drain(3) == [f"p{p}" for p in range(9, 0, -1)] + ["low"]


def test_ageing_can_be_changed(bus: Office, two: Desk) -> None:
    two.send("low")
    bus.wait(61)
    two.send("high", priority=1)
    two.alter_queue(ageing="5 minutes")
    assert two.drain(1) == ["high", "low"]


def test_delayed_ones_are_never_early(bus: Office, two: Desk) -> None:
    """However urgent."""
    two.send("urgent later", priority=9, delay="10 seconds")
    two.send("now")
    assert told(two.receive()) == ["now"]
    bus.wait(9.9)
    assert two.receive() == []
    bus.wait(0.1)
    assert told(two.receive()) == ["urgent later"]


def test_what_came_back_keeps_its_priority(bus: Office, two: Desk) -> None:
    two.send_all("u1", "u2", priority=5)
    a, b = two.receive(lease="10 seconds")
    two.give_back(a.receipt, delay=5)
    bus.wait(20)
    two.send("low")
    assert [(m.payload, m.priority) for m in two.receive()] == [("u1", 5), ("u2", 5), ("low", 0)]
    assert b.priority == 5


def test_a_priority_seen_for_the_first_time(bus: Office, two: Desk) -> None:
    """By a claim that began while its sender was open."""
    sender = bus.session().begin()
    sender.send("urgent", priority=7)
    two.send("low")
    assert told(two.receive()) == ["low"]
    sender.commit()
    assert told(two.receive()) == ["urgent"]


def test_priorities_off_later(s: Desk) -> None:
    """What was sent before keeps its place; nothing new gets one."""
    s.queue()
    s.send("low")
    s.send("urgent", priority=3)
    s.alter_queue(priorities=False)
    with pytest.raises(Exception, match="cannot have a priority"):
        s.send("x", priority=1)
    assert s.drain() == ["urgent", "low"]


def test_type_filter_across_priorities(two: Desk) -> None:
    for i in range(8):
        two.send(f"m{i}", priority=i % 4, type="a" if i < 4 else "b")
    assert told(two.receive(3, type="b")) == ["m7", "m6", "m5"]
    assert told(two.receive(9)) == ["m3", "m2", "m1", "m0", "m4"]


def test_inside_a_key(one: Desk) -> None:
    """A key with one place: its more urgent messages first, the same priority in order."""
    one.policy(concurrency=1)
    one.begin()
    for i in range(6):
        one.send(f"m{i}", "k", priority=i % 2)
    one.commit()
    assert one.drain() == ["m1", "m3", "m5", "m0", "m2", "m4"]
