"""What one attempt leaves for the next: state, by nack and by heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.bus import refused
from tests.queue.work import KINDS, Desk, Office


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, s: Desk) -> Desk:
    s.queue_of_kind(request.param)
    s.send("long work", "k")
    return s


def test_nack_carries_state(kind: Desk) -> None:
    states: list[Any] = []
    for step in range(1, 4):
        (m,) = kind.receive()
        states.append(m.state)
        kind.give_back(m.receipt, state={"done": step})
    assert states == [None, {"done": 1}, {"done": 2}]
    (m,) = kind.receive()
    kind.give_back(m.receipt)  # says nothing about it: it stays
    (m,) = kind.receive()
    assert m.state == {"done": 3}


def test_a_heartbeat_carries_state_past_the_death_of_its_worker(bus: Office, kind: Desk) -> None:
    (m,) = kind.receive()
    kind.extend(m.receipt, lease="10 seconds", state=[1, 2])
    kind.extend(m.receipt, lease="10 seconds")
    bus.wait(60)
    (m,) = kind.receive()
    assert (m.attempt, m.state) == (2, [1, 2])


def test_state_goes_with_the_dead_letter_and_comes_back(kind: Desk) -> None:
    (m,) = kind.receive()
    kind.extend(m.receipt, state="half way")
    kind.give_up(m.receipt)
    kind.rows("select postbus.redrive('q')")
    (m,) = kind.receive()
    assert (m.attempt, m.state) == (1, "half way")


def test_the_last_nack_keeps_its_state(kind: Desk) -> None:
    kind.alter_queue(max_attempts=1)
    kind.give_back(kind.receive()[0].receipt, state={"last": True})
    kind.rows("select postbus.redrive('q')")
    assert kind.receive()[0].state == {"last": True}


def test_peek_and_archive_show_it(s: Desk) -> None:
    s.queue(on_ack="archive")
    s.send("a")
    (m,) = s.receive()
    s.extend(m.receipt, state=7)
    assert s.value("select saved from postbus.peek('q')") == 7
    s.ack(m.receipt)
    assert s.value("select saved from postbus.archived('q')") == 7


def test_state_is_small(kind: Desk) -> None:
    (m,) = kind.receive()
    fits, too_large = "x" * 65_000, "x" * 66_000
    verbs: list[Callable[..., object]] = [kind.extend, kind.give_back]
    for verb in verbs:
        with refused("PB003", "of at most 65536"):
            verb(m.receipt, state=too_large)
    assert kind.peek()[0]["saved"] is None
    kind.extend(m.receipt, state=fits)
    kind.give_back(m.receipt)
    assert kind.receive()[0].state == fits


def test_streams_have_none(kind: Desk) -> None:
    kind.stream()
    kind.group()
    kind.fill(1)
    (event,) = kind.consume()
    (m,) = kind.receive()
    verbs: list[Callable[..., object]] = [kind.extend, kind.give_back]
    for verb in verbs:
        with refused("PB003", "messages of a stream have no state"):
            verb(m.receipt, event.receipt, state=1)
    assert kind.peek("in_flight")[0]["saved"] is None
    assert kind.ack(m.receipt, event.receipt) == 2
