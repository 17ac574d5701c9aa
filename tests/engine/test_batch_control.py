"""min_count, min_interval and min_lag: batches that are worth taking."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.bus import Bus, Session, payloads

ORDERINGS = ["stream", "key", "none"]


@pytest.fixture(params=ORDERINGS)
def one(request: pytest.FixtureRequest, s: Session) -> Session:
    s.stream()
    s.group(ordering=request.param)
    return s


def finish(s: Session, n: int, **named: Any) -> None:
    page = s.consume(**named)
    assert len(page) == n
    s.ack(page[0].batch)


def test_min_count(bus: Bus, one: Session) -> None:
    one.fill(2)
    assert one.consume(min_count=3) == []
    bus.wait(3600)
    assert one.consume(min_count=3) == []
    one.fill(1)
    finish(one, 3, min_count=3)
    one.fill(1)
    assert one.consume(min_count=2) == []
    finish(one, 1)


def test_min_count_pages_to_the_end_of_its_window(one: Session) -> None:
    """What was worth taking as a whole is taken as a whole."""
    one.fill(7)
    sizes = []
    while page := one.consume(3, min_count=5):
        sizes.append(len(page))
        one.ack(page[0].batch)
    assert sizes == [3, 3, 1]


def test_min_interval(bus: Bus, one: Session) -> None:
    one.fill(1)
    bus.wait(60)
    finish(one, 1, min_interval="1 minute")
    one.fill(1)
    bus.wait(59)
    assert one.consume(min_interval="1 minute") == []
    bus.wait(1)
    finish(one, 1, min_interval="1 minute")
    bus.wait(600)
    assert one.consume(min_interval="1 minute") == []


def test_min_count_or_min_interval(bus: Bus, one: Session) -> None:
    """Whichever comes first."""
    bus.wait(60)
    one.fill(1)
    finish(one, 1, min_count=5, min_interval="1 minute")
    one.fill(4)
    assert one.consume(min_count=5, min_interval="1 minute") == []
    one.fill(1)
    finish(one, 5, min_count=5, min_interval="1 minute")
    one.fill(1)
    assert one.consume(min_count=5, min_interval="1 minute") == []
    bus.wait(60)
    finish(one, 1, min_count=5, min_interval="1 minute")


def test_min_lag(bus: Bus, one: Session) -> None:
    one.fill(2)
    assert one.consume(min_lag="10 seconds") == []
    bus.wait(6)
    one.publish("young")
    assert one.consume(min_lag="10 seconds") == []
    bus.wait(6)
    page = one.consume(min_lag="10 seconds")
    assert payloads(page) == ["e1", "e2"]
    one.ack(page[0].batch)
    assert one.consume(min_lag="10 seconds") == []
    bus.wait(6)
    assert payloads(one.consume(min_lag="10 seconds")) == ["young"]


def test_min_lag_and_min_count(bus: Bus, one: Session) -> None:
    """Only events that are old enough count."""
    one.fill(2)
    assert one.consume(min_lag="10 seconds", min_count=3) == []
    bus.wait(6)
    one.fill(2)
    assert one.consume(min_lag="10 seconds", min_count=3) == []
    bus.wait(6)
    assert one.consume(min_lag="10 seconds", min_count=3) == []
    bus.wait(6)
    assert len(one.consume(min_lag="10 seconds", min_count=3)) == 4


def test_redeliveries_do_not_wait_for_company(one: Session) -> None:
    one.fill(3)
    page = one.consume(min_count=3)
    one.nack(page[0].receipt, delay=0)
    if one.figures()["in_flight"]:
        one.ack(page[0].batch)
    assert payloads(one.consume(min_count=100, min_interval="1 day", min_lag="1 day"))[0] == "e1"


def test_zero_means_no_condition(one: Session) -> None:
    assert one.consume(min_count=0, min_interval="0", min_lag="0") == []
    one.fill(1)
    finish(one, 1, min_count=0, min_interval="0", min_lag="0")
