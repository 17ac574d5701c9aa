"""Looking back: throughput, latency_percentiles, error_rate."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.conftest import Database
from tests.engine.bus import refused
from tests.queue.work import Desk, Office


@pytest.fixture
def bus(db: Database) -> Office:
    return Office(db)


@pytest.fixture
def s(bus: Office) -> Desk:
    return bus.session()


def buckets(s: Desk, call: str, *args: Any) -> list[tuple[Any, ...]]:
    """Rows without the time; that goes up by one bucket each."""
    rows = s.rows(f"select * from postbus.{call}", *args)
    steps = {b[0] - a[0] for a, b in itertools.pairwise(rows)}
    assert len(steps) <= 1
    return [row[1:] for row in rows]


def test_events_of_a_stream_by_minute(bus: Office, s: Desk) -> None:
    s.stream()
    bus.wait(30)
    for count in (60, 0, 6):
        if count:
            s.fill(count)
        s.maintain()
        bus.wait(60)
    assert buckets(s, "throughput('s', '4 minutes')") == [(60, 1.0), (0, 0.0), (6, 0.1), (0, 0.0)]
    assert buckets(s, "throughput('s', '4 minutes', '2 minutes')") == [(60, 0.5), (6, 0.05)]


def test_events_after_a_long_idle_time_are_counted(bus: Office, s: Desk) -> None:
    s.stream()
    bus.wait(5 * 86400)
    s.fill(7)
    s.maintain()
    assert sum(n for n, _ in buckets(s, "throughput('s')")) == 7


def test_finished_messages_of_a_queue(bus: Office, s: Desk) -> None:
    s.queue(on_ack="archive")
    s.send_many(5)
    s.receive(2)  # not finished
    assert len(s.drain()) == 3
    bus.wait(60)
    assert len(s.drain()) == 2
    assert buckets(s, "throughput('q', '3 minutes')") == [(0, 0.0), (3, 0.05), (2, pytest.approx(2 / 60))]


def test_latency_is_from_sending_to_finishing(bus: Office, s: Desk) -> None:
    s.queue(on_ack="archive")
    for _ in range(100):
        s.send("x")
        bus.wait(1)
    s.drain()
    [(messages, p50, p95, p99, most)] = s.rows("select * from postbus.latency_percentiles('q')")
    assert (messages, most) == (100, 100)
    assert (p50, p95, p99) == (pytest.approx(50.5), pytest.approx(95.05), pytest.approx(99.01))
    bus.wait(3601)
    assert s.rows("select * from postbus.latency_percentiles('q')") == [(0, None, None, None, None)]


def test_errors_of_a_queue(bus: Office, s: Desk) -> None:
    s.queue(on_ack="archive", max_attempts=3)
    s.send_many(3)
    first, second, third = s.receive()
    s.give_back(first.receipt)
    s.give_up(second.receipt)
    s.ack(third.receipt)
    s.drain()
    assert buckets(s, "error_rate('q', '2 minutes')") == [(0, 0, 0), (1, 2, 1)]
    s.queue("other")
    s.send("x", to="other")
    s.give_up(s.receive(of="other")[0].receipt)
    assert buckets(s, "error_rate('other', '2 minutes')") == [(0, None, None), (1, None, None)]


def test_dead_letters_of_a_stream(bus: Office, s: Desk) -> None:
    s.stream()
    for name in ("one", "two"):
        s.group(name)
    s.fill(2)
    for name in ("one", "two"):
        s.rows("select postbus.dead_letter(array(select receipt from postbus.consume('s', %s)))", name)
    bus.wait(60)
    assert buckets(s, "error_rate('s', '2 minutes')") == [(4, None, None), (0, None, None)]


def test_what_is_not_kept_is_refused(s: Desk) -> None:
    s.queue()
    for call in ("throughput('q')", "latency_percentiles('q')"):
        with refused("PB003", "on_ack"):
            s.rows(f"select * from postbus.{call}")
    with refused("PB001"):
        s.rows("select * from postbus.throughput('nowhere')")
    with refused("PB001"):
        s.rows("select * from postbus.error_rate('nowhere')")


@pytest.mark.parametrize(
    ("period", "bucket"), [("1 hour", "0"), ("1 second", "1 minute"), ("1 year", "1 second")]
)
def test_buckets_have_a_reasonable_size(s: Desk, period: str, bucket: str) -> None:
    s.stream()
    for call in ("throughput", "error_rate"):
        with refused("PB003", "bucket"):
            s.rows(f"select * from postbus.{call}('s', %s::interval, %s::interval)", period, bucket)
