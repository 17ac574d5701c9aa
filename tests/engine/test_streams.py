"""Streams: creating, altering, dropping and listing them, also beside producers that are at work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.bus import Bus, Session, refused

DEFAULTS = {
    "lanes": 1, "segments": 3, "retain": "1 day", "max_retain": "7 days", "rotate_every": "12:00:00",
    "event_ttl": None, "dedupe_window": "01:00:00", "notify": True,
}  # fmt: skip

GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"lanes": 1024}, {"lanes": 1024}),
    ({"lanes": "3"}, {"lanes": 3}),
    ({"segments": 2}, {"segments": 2}),
    ({"retain": 0}, {"retain": "00:00:00", "rotate_every": "00:01:00"}),
    ({"retain": "30 days"}, {"retain": "30 days", "max_retain": "30 days", "rotate_every": "15 days"}),
    ({"max_retain": None}, {"max_retain": None}),
    ({"rotate_every": 0.5}, {"rotate_every": "00:00:00.5"}),
    ({"event_ttl": "90 minutes"}, {"event_ttl": "01:30:00"}),
    ({"dedupe_window": 0}, {"dedupe_window": "00:00:00"}),
    ({"notify": False}, {"notify": False}),
]

BAD: list[dict[str, Any]] = [
    {"lane": 1},
    {"lanes": 0},
    {"lanes": 1025},
    {"lanes": 1.5},
    {"lanes": "x"},
    {"lanes": None},
    {"lanes": 10**12},
    {"segments": 1},
    {"segments": 65},
    {"retain": None},
    {"retain": -1},
    {"retain": "long"},
    {"retain": [1]},
    {"retain": True},
    {"retain": 1e300},
    {"retain": "8 days"},
    {"max_retain": "1 hour"},
    {"rotate_every": 0},
    {"rotate_every": None},
    {"event_ttl": "-1 s"},
    {"dedupe_window": None},
    {"notify": "yes"},
    {"notify": None},
]


def listed(s: Session, name: str = "s") -> dict[str, Any]:
    query = "select to_jsonb(l) from postbus.list_streams() l where l.name = %s"
    return dict(s.value(query, name))


def segments(s: Session, name: str) -> set[int]:
    query = (
        "select g.leaf from postbus.segment g join postbus.stream s on s.id = g.stream_id where s.name = %s"
    )
    return {leaf for (leaf,) in s.rows(query, name)}


# Options and names.


def test_options_and_defaults(s: Session) -> None:
    for n, (options, expected) in enumerate(GOOD):
        s.stream(f"s{n}", **options)
        row = listed(s, f"s{n}")
        assert {k: row[k] for k in DEFAULTS} == {**DEFAULTS, **expected}


def test_bad_options(s: Session) -> None:
    s.stream("there", max_retain="7 days")
    before = s.rows("select * from postbus.stream")
    for options in BAD:
        if options == {"retain": "8 days"}:
            s.stream("long", **options)  # max_retain follows, where it is not named
            s.rows("select postbus.drop_stream('long')")
        else:
            with refused("PB003", next(iter(options))):
                s.stream(**options)
        with refused("PB003", next(iter(options))):
            s.alter("there", **options)
    assert s.rows("select * from postbus.stream") == before
    for not_an_object in ["[]", "null", "1"]:
        with refused("PB003", "Known options: lanes"):
            s.rows("select postbus.create_stream('s', %s)", not_an_object)


def test_names(s: Session) -> None:
    for bad in ["", "1a", "a b", "a/b", 'a"b', "é", "-a", ".a", "a" * 56, None]:
        with refused("PB003", "1 to 55 letters"):
            s.rows("select postbus.create_stream(%s)", bad)
    for good in ["a", "_", "A", "a.b:c-d_1", "a" * 55]:
        s.stream(good)
        s.group("g", of=good)
        s.publish("p", to=good)
        assert s.take(of=good) == ["p"]


def test_existing_and_unknown(s: Session) -> None:
    s.stream()
    with refused("PB002", "alter_stream"):
        s.stream()
    for call in ["alter_stream('x', '{}')", "drop_stream('x')", "tick('x')", "pause('x')"]:
        with refused("PB001", "'x' does not exist"):
            s.rows(f"select postbus.{call}")


def test_two_creators_of_one_name(bus: Bus, s: Session) -> None:
    a = bus.session().begin()
    a.stream()
    with bus.blocked(s, s.stream) as second:
        a.commit()
    with refused("PB002"):
        second.result()


def test_created_and_rolled_back(bus: Bus, s: Session) -> None:
    a = bus.session().begin()
    a.stream()
    a.group()
    a.publish("gone")
    a.rollback()
    with refused("PB001"):
        s.publish("p")
    s.stream()
    s.group()
    s.publish("p")
    assert s.take() == ["p"]


def test_alter(s: Session) -> None:
    s.stream()
    s.group()
    s.publish("before")
    s.alter(
        segments=5, retain="2 days", max_retain=None, event_ttl=60, dedupe_window=1, notify=False, lanes=3
    )
    row = listed(s)
    expected = {"segments": 5, "retain": "2 days", "max_retain": None, "event_ttl": "00:01:00", "lanes": 3}
    assert {k: row[k] for k in expected} == expected
    assert len(segments(s, "s")) == 5
    s.publish("after")
    assert s.take() == ["before", "after"]
    s.alter(event_ttl=None)
    assert listed(s)["event_ttl"] is None
    s.alter(segments=2)
    assert listed(s)["segments"] == 2


def test_list(bus: Bus, s: Session) -> None:
    assert s.rows("select * from postbus.list_streams()") == []
    s.stream("b")
    s.stream("a")
    s.group(of="b")
    s.fill(7, to="b")
    s.publish("later", to="b", deliver_at=bus.now.replace(minute=1))
    page = s.consume(2, of="b")
    s.rows("select postbus.dead_letter(%s::text)", page[0].receipt)
    s.maintain()
    assert [r[0] for r in s.rows("select name from postbus.list_streams()")] == ["a", "b"]
    row = listed(s, "b")
    assert [row[k] for k in ("groups", "events", "scheduled", "dead_letters", "paused")] == [
        1,
        7,
        1,
        1,
        False,
    ]
    assert row["size_bytes"] > 0
    assert row["last_tick"] > listed(s, "a")["last_tick"]


# Dropping.


def test_drop_with_groups_needs_force(s: Session) -> None:
    s.stream()
    s.group()
    s.fill(2)
    page = s.consume(1)
    with refused("PB003", "force => true"):
        s.rows("select postbus.drop_stream('s')")
    assert s.ack(page[0].batch) == 1
    s.rows("select postbus.drop_stream('s', force => true)")
    with refused("PB001"):
        s.consume()
    s.maintain()
    for table in ["stream", "group", "tick", "lease", "progress", "slot", "trash"]:
        assert s.rows(f'select * from postbus."{table}"') == []


def test_leaves_are_used_again(s: Session) -> None:
    s.stream()
    leaves = segments(s, "s")
    s.fill(5)
    s.rows("select postbus.drop_stream('s')")
    s.stream("early")
    assert segments(s, "early").isdisjoint(leaves), "they are not empty yet"
    s.maintain(6)
    s.stream("t")
    assert segments(s, "t") == leaves
    s.group(of="t")
    s.publish("new", to="t")
    assert s.take(of="t") == ["new"]


def test_name_can_be_used_again(s: Session) -> None:
    for turn in range(3):
        s.stream()
        s.group()
        s.publish(f"turn {turn}", dedupe_key="d")
        assert s.take() == [f"turn {turn}"]
        s.rows("select postbus.drop_stream('s', true)")


def test_drop_does_not_wait_for_producers(bus: Bus, s: Session) -> None:
    """What they publish goes with the stream; their leaves are emptied when they have ended."""
    s.stream()
    leaf = s.value("select leaf from postbus.stream")
    a, b = bus.session().begin(), bus.session().begin("repeatable read")
    a.publish("open")
    b.publish("open")
    s.rows("set lock_timeout = '50ms'")
    s.rows("select postbus.drop_stream('s')")
    s.maintain(5)
    b.publish("its snapshot still has the stream")
    with refused("PB001"):
        a.publish("gone")
    a.rollback()
    s.stream()
    s.group()
    assert leaf not in segments(s, "s")
    b.commit()
    s.maintain(6)
    assert s.value("select count(*) from postbus.log") == 0
    s.publish("new")
    assert s.take() == ["new"]
    s.stream("t")
    assert leaf in segments(s, "t")


def test_straggler_of_a_dropped_stream_in_a_used_leaf(bus: Bus, s: Session) -> None:
    """A producer whose snapshot is older than the drop writes where another stream lives by now."""
    s.stream()
    leaves = segments(s, "s")
    old = bus.session().begin("repeatable read")
    holder = bus.session().begin()
    holder.rows("select last_value from postbus.id_1")  # the sequences cannot be dropped meanwhile
    holder.rows("select last_value from postbus.register_1")
    s.rows("select postbus.drop_stream('s')")
    s.maintain(6)
    s.stream("t", rotate_every=1, retain=0)
    assert segments(s, "t") == leaves
    for ordering in ["key", "stream"]:
        s.group(ordering, of="t", ordering=ordering)
    s.publish("one", to="t")
    old.publish("straggler")
    s.publish("two", to="t")
    old.commit()
    holder.commit()
    s.publish("three", to="t")
    for ordering in ["key", "stream"]:
        assert s.take(of="t", by=ordering) == ["one", "two", "three"]
    bus.wait(10)
    s.maintain(10)
    assert listed(s, "t")["events"] == 3


def test_straggler_after_everything_is_gone(bus: Bus, s: Session) -> None:
    """Its sequences are dropped: it gets an error, and harms nobody."""
    s.stream()
    old = bus.session().begin("repeatable read")
    s.rows("select postbus.drop_stream('s')")
    s.maintain(6)
    s.stream("t")
    s.group(of="t")
    with pytest.raises(Exception, match=r"relation|stream"):
        old.publish("straggler")
    old.rollback()
    assert s.take(of="t") == []


# Beside open producers.


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_new_stream_beside_an_open_producer(bus: Bus, s: Session, level: str) -> None:
    """Nobody waits, and the open transaction can publish into what it can see."""
    s.stream()
    s.group()
    a = bus.session().begin(level)
    a.publish("one")
    s.rows("set lock_timeout = '50ms'")
    s.stream("t")
    s.group(of="t")
    if level == "read committed":
        a.publish("two", to="t")
        a.fill(2, to="t")
    else:
        with refused("PB001"):
            a.rows("savepoint x; select postbus.publish('t', 'two'::text)")
        a.rows("rollback to savepoint x")
    a.publish("three")
    a.commit()
    assert s.take() == ["one", "three"]
    assert s.take(of="t") == (["two", "e1", "e2"] if level == "read committed" else [])


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_growing_ring_beside_an_open_producer(bus: Bus, s: Session, level: str) -> None:
    s.stream(segments=2, rotate_every=1)
    s.group()
    a = bus.session().begin(level)
    a.publish("one")
    s.rows("set lock_timeout = '50ms'")
    s.alter(segments=4)
    got = []
    for turn in range(6):
        s.publish(f"turn {turn}")
        bus.wait(2)
        s.maintain(2)
        a.publish(f"open {turn}")
        got += s.take()
    a.commit()
    assert got == [f"turn {turn}" for turn in range(6)]
    assert s.take() == ["one", *(f"open {turn}" for turn in range(6))]


def test_new_stream_in_the_transaction_of_a_producer(bus: Bus, s: Session) -> None:
    s.stream()
    a = bus.session().begin()
    a.publish("one")
    a.stream("t")
    a.group(of="t")
    a.publish("two", to="t")
    s.publish("nobody waits")
    a.commit()
    assert s.take(of="t") == ["two"]
