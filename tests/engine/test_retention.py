"""Retention: segments turn, are emptied when nobody needs them, and never under a reader's feet."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.engine.bus import Bus, Session, refused


@pytest.fixture
def one(s: Session) -> Session:
    """A stream whose segments turn every minute and are kept by readers only."""
    s.stream(segments=3, retain=0, max_retain="1 hour", rotate_every="1 minute")
    s.group()
    return s


def leaf(s: Session) -> int:
    return int(s.value("select leaf from postbus.stream where name = 's'"))


def rows(s: Session, leaf_no: int) -> int:
    return int(s.value(f"select count(*) from postbus.log_{leaf_no}"))


def floor(s: Session) -> int:
    return int(s.value("select floor_tick from postbus.stream where name = 's'"))


def turn(bus: Bus, s: Session, minutes: float = 2) -> dict[str, int]:
    """Time goes by, with enough upkeep for everything that is due."""
    bus.wait(minutes * 60)
    return s.maintain(4)


def test_rotation_needs_time_and_events(bus: Bus, one: Session) -> None:
    first = leaf(one)
    turn(bus, one)
    assert leaf(one) == first, "an empty segment does not turn"
    one.publish("a")
    assert one.maintain(3)["rotate"] == 1
    second = leaf(one)
    assert second != first
    bus.wait(59)
    one.publish("b")
    assert "rotate" not in one.maintain(3)
    bus.wait(2)
    assert one.maintain(3)["rotate"] == 1
    assert leaf(one) not in (first, second)
    assert one.take() == ["a", "b"]


def test_segments_are_used_in_a_ring(bus: Bus, one: Session) -> None:
    seen = []
    for i in range(9):
        one.publish(f"e{i}")
        assert one.take() == [f"e{i}"]
        turn(bus, one)
        seen.append(leaf(one))
    assert len(set(seen)) == 3
    assert seen[:3] == seen[3:6] == seen[6:]
    assert one.value("select count(*) from postbus.log") <= 2


def test_full_ring_goes_on_writing(bus: Bus, one: Session) -> None:
    """No empty segment to turn to, because a group is behind: nothing stops and nothing is lost."""
    for i in range(8):
        one.publish(f"e{i}")
        turn(bus, one, 1.1)
    assert one.take() == [f"e{i}" for i in range(8)]
    done = turn(bus, one)
    assert done["clean"] >= 1


def test_cleaning_waits_for_the_slowest(bus: Bus, one: Session) -> None:
    one.group("slow")
    for i in range(2):
        one.publish(f"e{i}")
        one.take()
        turn(bus, one)
    assert "clean" not in turn(bus, one)
    page = one.consume(by="slow")
    assert len(page) == 2
    assert "clean" not in turn(bus, one, 0.1), "an open lease holds it too"
    one.ack(page[0].batch)
    assert turn(bus, one, 0.1)["clean"] == 2


def test_waiting_and_dead_messages_hold_nothing_back(bus: Bus, one: Session) -> None:
    """They carry the whole envelope."""
    one.publish("waits")
    one.publish("dies", "k", headers='{"h": 1}')
    page = one.consume()
    one.nack(page[0].receipt, delay=7200)
    one.rows("select postbus.dead_letter(%s::text)", page[1].receipt)
    old = leaf(one)
    turn(bus, one)
    assert rows(one, old) == 0
    bus.wait(7200)
    assert one.take() == ["waits"]
    one.rows("select postbus.redrive('s')")
    (m,) = one.consume()
    assert (m.payload, m.key, m.headers) == ("dies", "k", {"h": 1})


def test_retain_keeps_what_is_consumed(bus: Bus, s: Session) -> None:
    s.stream(retain="10 minutes", rotate_every="1 minute")
    s.group()
    s.publish("e")
    s.take()
    old = leaf(s)
    for _ in range(4):
        assert "clean" not in turn(bus, s)
    s.rows("select postbus.seek('s', 'g', 'earliest')")
    assert s.take() == ["e"]
    s.publish("later")
    s.take()
    turn(bus, s, 4)
    assert rows(s, old) == 0
    s.rows("select postbus.seek('s', 'g', 'earliest')")
    assert s.take() == ["later"]


def test_without_groups_retain_alone_counts(bus: Bus, s: Session) -> None:
    s.stream(retain="10 minutes", rotate_every="1 minute")
    s.publish("e")
    turn(bus, s, 5)
    s.group(start="earliest")
    assert s.take() == ["e"]
    s.rows("select postbus.drop_group('s', 'g')")
    turn(bus, s, 11)
    turn(bus, s, 11)
    s.group(start="earliest")
    assert s.take() == []


def test_abandoned_group_loses_its_position(bus: Bus, one: Session) -> None:
    one.group("gone")
    one.group("busy", ordering="none")
    for i in range(3):
        one.publish(f"e{i}")
        one.take()
        one.take(by="busy")
        turn(bus, one)
    assert floor(one) <= one.figures("gone")["position_tick"]
    bus.wait(3600)
    one.publish("last")
    one.take()
    one.take(by="busy")
    turn(bus, one)
    assert one.figures("gone")["lost"] is True
    assert one.figures("g")["lost"] is False
    for _ in range(2):
        with refused("PB005", "seek('s', 'gone', 'earliest')"):
            one.consume(by="gone")
    with refused("PB005", "seek to earliest"):
        one.rows("select postbus.seek('s', 'gone', 'tick:1')")
    one.rows("select postbus.seek('s', 'gone', 'earliest')")
    one.publish("more")
    assert one.take(by="gone")[-1:] == ["more"]
    assert one.take() == ["more"]


def test_max_retain_null_waits_for_ever(bus: Bus, one: Session) -> None:
    one.alter(max_retain=None)
    one.publish("e")
    for _ in range(4):
        turn(bus, one, 60 * 24 * 30)
    assert one.take() == ["e"]


@pytest.mark.parametrize("prepare", [False, True], ids=["simple", "extended"])
def test_cleaning_does_not_wait_for_readers(bus: Bus, one: Session, prepare: bool) -> None:
    """And while it tries, no producer waits behind it for long."""
    one.publish("e")
    one.take()
    old = leaf(one)
    turn(bus, one)
    bus.wait(0)
    one.publish("f")
    one.take()
    reader = bus.session().begin()
    reader.rows(f"select count(*) from postbus.log_{leaf(one)}")
    target = leaf(one)
    bus.wait(120)
    producer = bus.session()
    producer.rows("set lock_timeout = '1s'")
    slowest = 0.0
    for i in range(8):
        start = time.monotonic()
        one.conn.execute("select * from postbus.maintain()", prepare=prepare)
        slowest = max(slowest, time.monotonic() - start)
        producer.publish(f"g{i}")
    assert rows(one, target) == 1, "it is being read"
    assert slowest < 3
    reader.commit()
    one.take()
    bus.wait(120)
    for _ in range(8):
        one.conn.execute("select * from postbus.maintain()", prepare=prepare)
    assert rows(one, target) == 0
    assert rows(one, old) <= 8


def test_open_producer_holds_its_segment(bus: Bus, one: Session) -> None:
    a = bus.session().begin()
    a.publish("open")
    old = leaf(one)
    one.publish("e")
    one.take()
    turn(bus, one)
    turn(bus, one)
    assert rows(one, old) == 1
    a.commit()
    assert one.take() == ["open"]
    turn(bus, one)
    assert rows(one, old) == 0


def test_event_ttl_skips_and_counts(bus: Bus, s: Session) -> None:
    s.stream(event_ttl="10 minutes")
    s.group()
    s.group("h", ordering="stream")
    s.fill(5)
    bus.wait(601)
    s.publish("young")
    s.publish("younger")
    page = s.consume(5)
    assert [m.payload for m in page] == ["young", "younger"], "a page of expired events is not the end"
    assert s.figures()["expired"] == 5
    s.maintain(3)
    assert s.figures()["expired"] == 5
    assert s.ack(page[0].batch) == 2
    bus.wait(601)
    assert s.take(by="h") == []
    assert s.figures("h")["expired"] == 7
    s.publish("e")
    page = s.consume()
    bus.wait(3600)
    assert [m.attempt for m in s.consume()] == [2], "what was handed out is not forgotten"


def test_upkeep_prunes_positions_and_ticks(bus: Bus, one: Session) -> None:
    def sizes() -> list[Any]:
        return [one.value(f"select count(*) from postbus.{t}") for t in ("progress", "tick")]

    for i in range(60):
        one.publish(f"e{i}")
        one.take()
    assert min(sizes()) > 50
    done = turn(bus, one)
    assert done["prune"] > 50
    turn(bus, one)
    assert max(sizes()) < 10
    assert one.value("select events from postbus.list_streams()") == 60
    one.publish("more")
    assert one.take() == ["more"]


def test_upkeep_says_what_it_did(bus: Bus, one: Session) -> None:
    assert one.maintain(5).keys() <= {"leaves", "count", "prune"}
    one.publish("a")
    one.publish("b", deliver_at=bus.now.replace(second=1))
    one.publish("c", dedupe_key="d")
    bus.wait(4000)
    done: list[Any] = one.rows("select object, step, done, problem from postbus.maintain()")
    by_step = {step: (name, n, problem) for name, step, n, problem in done}
    assert by_step["scheduled"] == ("s", 1, None)
    assert by_step["tick"] == ("s", 1, None)
    assert by_step["dedupe"] == ("s", 1, None)
    assert by_step["rotate"] == ("s", 1, None)
    assert one.value(
        "select sum(n) from (select done as n from postbus.maintain() where step = 'count') x"
    ) in (1, None)
    assert one.value("select events from postbus.list_streams()") == 3


def test_idle_lanes_do_not_pin_retention(bus: Bus, s: Session) -> None:
    s.stream(lanes=8, retain=0, max_retain=None, rotate_every="1 minute")
    s.group()
    old = leaf(s)
    for i in range(3):
        s.publish(f"e{i}", "one key")
        s.take()
        turn(bus, s)
    assert s.rows(f"select * from postbus.log_{old} where payload = 'e0'") == []


def test_two_maintainers_at_once(bus: Bus, one: Session) -> None:
    """The second leaves to the first what the first is at, and waits for nothing."""
    one.publish("a")
    other = bus.session().begin()
    other.maintain()
    one.rows("set lock_timeout = '100ms'")
    bus.wait(120)
    one.maintain(3)
    assert one.take() == ["a"]
    other.commit()
