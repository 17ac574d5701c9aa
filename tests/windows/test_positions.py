"""Positions: what they say, what becomes of them, who may have them."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.conftest import Database, run_sql
from tests.engine.bus import Bus, Session, refused
from tests.windows.reading import bound, by_columns, count, plan, position, read, window


def lost(s: Session, at: str, saying: str = "") -> None:
    now = position(s.conn)
    with refused("PB005", saying):
        window(s.conn, at, now)


def test_the_text_is_stable_and_says_what_it_is(s: Session) -> None:
    s.stream()
    first = position(s.conn)
    assert position(s.conn) == first, "nothing happened"
    assert list(json.loads(first)) == ["stream", "era", "tick", "snapshot"]
    s.fill(10)
    middle = bound(s.conn, first, position(s.conn), 4)
    assert list(json.loads(middle))[4:] == ["upper", "upper_snapshot", "last_id"]
    held = s.value("select postbus.hold_position('s', %s, 'me')", middle)
    assert held == middle


def test_windows_follow_one_another(s: Session) -> None:
    s.stream(lanes=3)
    a = position(s.conn, "earliest")
    s.fill(5)
    b = position(s.conn)
    s.fill(5)
    c = position(s.conn)
    both = window(s.conn, a, c, parts=4)
    assert window(s.conn, a, b) + window(s.conn, b, c) == both == [f"e{i}" for i in [*range(1, 6)] * 2]
    assert window(s.conn, b, b) == []
    assert plan(s.conn, c, position(s.conn)) == []
    assert (count(s.conn, a, c), count(s.conn, b, c), count(s.conn, a, c, 7)) == (10, 5, 7)


def test_bounds_go_through_a_window(s: Session) -> None:
    s.stream(lanes=2)
    at = position(s.conn)
    late = s.bus.session().begin()
    late.fill(30)
    s.fill(100)
    middle = position(s.conn)
    s.fill(50)
    late.commit()
    got: list[str] = []
    sizes = []
    while True:
        until = bound(s.conn, at, position(s.conn), 40)
        if until == at:
            break
        rows = window(s.conn, at, until, parts=3)
        sizes.append(len(rows))
        got += rows
        at = until
    assert max(sizes) <= 40
    assert len(sizes) < 10
    assert sorted(got) == sorted(f"e{i}" for n in (30, 100, 50) for i in range(1, n + 1))
    # From a tick to which one of the late events was not visible.
    assert count(s.conn, middle, position(s.conn)) == 80


def test_a_large_late_transaction_is_divided_too(s: Session) -> None:
    s.stream()
    late = s.bus.session().begin()
    late.fill(3000)
    s.fill(10)
    a = position(s.conn)
    late.commit()
    b = position(s.conn)
    parts = plan(s.conn, a, b, 1, 100)
    assert [n for _, n in parts] == [100] * 30
    assert [len(read(s.conn, part)) for part, _ in parts] == [100] * 30
    assert len(window(s.conn, a, bound(s.conn, a, b, 7))) == 7


def test_a_position_by_time(bus: Bus, s: Session) -> None:
    s.stream(lanes=3)
    s.publish("zero")
    times = []
    for name in ["one", "two", "three"]:
        bus.wait(10)
        times.append(bus.now_text)
        s.publish(name)
        if name != "two":
            s.maintain()
    now = position(s.conn)
    assert window(s.conn, position(s.conn, times[1]), now) == ["two", "three"]
    assert window(s.conn, position(s.conn, "2020-01-01"), now) == ["zero", "one", "two", "three"]
    assert window(s.conn, position(s.conn, "2200-01-01"), now) == []
    assert window(s.conn, position(s.conn, times[0]), position(s.conn, times[2])) == ["one", "two"]
    assert window(s.conn, position(s.conn, "earliest"), position(s.conn, times[0])) == ["zero"]
    with refused("PB003", "earliest, latest or a timestamp"):
        position(s.conn, "yesterday morning")


def test_what_commits_after_a_position_by_time_is_not_skipped(bus: Bus, s: Session) -> None:
    s.stream()
    late = bus.session().begin()
    late.publish("early and late")
    bus.wait(10)
    s.publish("in time")
    at = position(s.conn, bus.now_text)
    late.commit()
    assert sorted(window(s.conn, at, position(s.conn))) == ["early and late", "in time"]


def test_bad_positions(s: Session) -> None:
    s.stream()
    s.stream("other")
    good = position(s.conn)
    for text in ["", "x", "{}", "[]", "null", '{"stream": "s"}', good[:-1], good.replace("era", "eras")]:
        with refused("PB003", "not a position"):
            plan(s.conn, text, good)
    with refused("PB003", "belongs to stream 'other'"):
        plan(s.conn, position(s.conn, of="other"), good)
    with refused("PB003", "not a part"):
        read(s.conn, good)
    with refused("PB001"):
        position(s.conn, of="nowhere")
    s.publish("x")
    with refused("PB003", "ends before it begins"):
        plan(s.conn, position(s.conn), good)
    with refused("PB003", "parts must be"):
        plan(s.conn, good, good, 0)
    with refused("PB003", "at least 1"):
        bound(s.conn, good, good, 0)
    s.begin("repeatable read")
    with refused("PB003", "READ COMMITTED"):
        position(s.conn)
    s.rollback()


def test_a_tick_with_another_snapshot_is_another_tick(s: Session) -> None:
    s.stream()
    at = json.loads(position(s.conn))
    lost(s, json.dumps({**at, "snapshot": "5:5:"}), "restored")
    lost(s, json.dumps({**at, "era": 2}), "era")
    with refused("PB005", "never was"):
        plan(s.conn, position(s.conn), json.dumps({**at, "tick": at["tick"] + 1000}))


def test_only_held_positions_outlive_upkeep(s: Session) -> None:
    s.stream()
    s.publish("a")
    free = position(s.conn)
    s.publish("b")
    held = position(s.conn, holder="me")
    for i in range(3):
        s.publish(str(i))
        s.maintain(3)
    assert window(s.conn, held, position(s.conn)) == ["0", "1", "2"]
    lost(s, free, "no longer kept")
    assert s.value("select postbus.release_positions('me')") == 1
    # What was held once goes when upkeep looks at all of them, which it does now and then.
    for _ in range(500):
        s.publish("x")
        s.maintain()
        if not s.rows("select 1 from postbus.tick where id = %s", json.loads(held)["tick"]):
            break
    lost(s, held)


def test_a_holder_keeps_the_last_hundred(s: Session) -> None:
    s.stream()
    first = position(s.conn, holder="me")
    for i in range(220):
        s.publish(str(i))
        bound(s.conn, first, position(s.conn, holder="me"), 1, "me")
    assert s.value("select count(*) from postbus.held_tick") == 200
    assert json.loads(first)["tick"] in [r[0] for r in s.rows("select tick from postbus.held_tick")], "in use"
    s.rows("select postbus.drop_stream('s')")
    assert s.value("select count(*) from postbus.held_tick") == 0


def test_truncated_events_are_an_error(bus: Bus, s: Session) -> None:
    s.stream(retain=0, rotate_every="1 minute")
    first = position(s.conn, holder="me")
    s.fill(10)
    until = position(s.conn, holder="me")
    ((part, _),) = plan(s.conn, first, until)
    for _ in range(6):
        bus.wait(120)
        s.publish("x")
        s.maintain(3)
    lost(s, first, "no longer kept")
    for reading in (read, by_columns):
        with refused("PB005", "no longer kept"):
            reading(s.conn, part)
    s.publish("y")
    assert window(s.conn, position(s.conn, "earliest"), position(s.conn))[-1] == "y"


@pytest.mark.parametrize("read", [read, by_columns])
def test_truncated_while_it_is_read(bus: Bus, s: Session, read: Any) -> None:
    """The reader is behind the lock of the cleaner: it finds an empty leaf, and says so."""
    s.stream(retain=0, rotate_every="1 minute", segments=2)
    first = position(s.conn, holder="me")
    s.fill(10)
    ((part, _),) = plan(s.conn, first, position(s.conn, holder="me"))
    s.maintain(3)
    bus.wait(120)
    for _ in range(3):
        s.rows("select * from postbus.maintain(false)")
    s.publish("in the next leaf")
    s.rows("select * from postbus.maintain(false)")
    cleaner, reader = bus.session(), bus.session()
    cleaner.begin()
    assert cleaner.value("select postbus._clean_one()") == "s"
    with bus.blocked(reader, lambda: read(reader.conn, part)) as result:
        cleaner.commit()
    with refused("PB005", "no longer kept"):
        result.result()


def test_an_idle_position_writes_nothing(s: Session) -> None:
    s.stream()
    s.publish("x")
    at = position(s.conn, holder="me")
    for _ in range(3):
        s.begin()
        assert position(s.conn, holder="me") == at
        s.rows("select 1")
        if s.value("select pg_current_xact_id_if_assigned() is null"):
            s.commit()
            return
        s.commit()
    pytest.fail("an xid each time")


def test_a_holder_waits_for_upkeep_that_is_at_work(bus: Bus, s: Session) -> None:
    """Upkeep has just decided which ticks go: the position that comes out is not one of them."""
    s.stream()
    s.publish("a")
    first = position(s.conn, "earliest", "me")
    position(s.conn)
    s.publish("b")
    upkeep, reader = bus.session(), bus.session()
    upkeep.begin()
    upkeep.rows("select * from postbus.maintain(false)")
    with bus.blocked(reader, lambda: position(reader.conn, holder="me")) as given:
        upkeep.commit()
    s.publish("c")
    s.maintain(3)
    assert window(s.conn, first, given.result()) == ["a", "b"]
    assert window(s.conn, given.result(), position(s.conn)) == ["c"]


def test_a_position_commits_synchronously(s: Session) -> None:
    s.stream()
    s.rows("set synchronous_commit = off")
    s.publish("x")
    s.begin()
    position(s.conn)
    assert s.value("select current_setting('synchronous_commit')") == "on"
    s.commit()
    assert s.value("select current_setting('synchronous_commit')") == "off"


@pytest.mark.parametrize("ordering", ["stream", "key", "none"])
def test_a_group_follows(s: Session, ordering: str) -> None:
    s.stream(lanes=3)
    s.group(ordering=ordering)
    a = position(s.conn)
    s.fill(20)
    c = position(s.conn)
    b = bound(s.conn, a, c, 8)

    def follow(at: str) -> bool:
        return bool(s.value("select postbus.follow_group('s', 'g', %s)", at))

    assert [follow(a), follow(b), follow(b), follow(a)] == [False, True, False, False]
    assert s.figures()["pending"] == 12
    assert [follow(c), follow(b)] == [True, False]
    assert s.figures()["pending"] == 0
    s.fill(5)
    assert sorted(filter(None, s.take())) == [f"e{i}" for i in range(1, 6)], "it can consume from there"
    s.fill(5)
    s.consume(1)
    with refused("PB003", "workers of its own"):
        follow(position(s.conn))
    with refused("PB001", "create_group"):
        s.value("select postbus.follow_group('s', 'nobody', %s)", c)


def test_a_follower_survives_a_lane_change(s: Session) -> None:
    s.stream(lanes=3)
    s.group(ordering="key")
    s.fill(10, keys=5)
    s.alter(lanes=5)
    s.maintain(2)
    s.fill(10, keys=5)
    assert s.value("select postbus.follow_group('s', 'g', %s)", position(s.conn))
    assert s.figures()["pending"] == 0
    s.fill(5, keys=5)
    assert len(s.take()) == 5


def test_retention_waits_for_a_follower(bus: Bus, s: Session) -> None:
    s.stream(retain=0, rotate_every="1 minute")
    s.group()
    first = position(s.conn)
    s.fill(10)

    def turn() -> None:
        for _ in range(6):
            bus.wait(120)
            s.publish("x")
            s.maintain(3)

    turn()
    assert window(s.conn, first, position(s.conn))[:10] == [f"e{i}" for i in range(1, 11)]
    s.value("select postbus.follow_group('s', 'g', %s)", position(s.conn))
    turn()
    lost(s, first)


def test_readers_read_and_writers_follow(db: Database, s: Session, server_dsn: str) -> None:
    s.stream()
    s.group()
    s.fill(3)
    roles = [f"{kind}_of_{db.name}" for kind in ("reader", "writer")]
    for role, kind in zip(roles, ("reader", "writer"), strict=True):
        run_sql(server_dsn, "create role {} login in role {}", role, f"postbus_{kind}")
    try:
        for role in roles:
            with psycopg.connect(make_conninfo(db.dsn, user=role), autocommit=True) as c:
                now = position(c, holder=role)
                assert (
                    len(window(c, position(c, "earliest"), bound(c, position(c, "earliest"), now, 2, role)))
                    == 2
                )
                assert count(c, position(c, "earliest"), now) == 3
                follow = "select postbus.follow_group('s', 'g', %s)"
                if "writer" in role:
                    c.execute(follow, [now])
                else:
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        c.execute(follow, [now])
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    c.execute("select * from postbus.log")
    finally:
        for role in roles:
            run_sql(server_dsn, "drop role {}", role)
