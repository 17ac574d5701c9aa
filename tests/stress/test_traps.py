"""The traps that the random stress steps into only now and then, one by one and step by step."""

from __future__ import annotations

import time

import psycopg
import pytest
from psycopg import errors

from tests.conftest import Database
from tests.stress.sessions import (
    Connection,
    ack,
    alter,
    consume,
    group,
    leaf,
    maintain,
    publish,
    rotate,
    rows_in,
    stream,
    take,
    value,
    wait_for,
)

LEVELS = ["read committed", "repeatable read", "serializable"]


def begin(db: Database, level: str = "read committed") -> Connection:
    """A transaction that has its snapshot."""
    c = db.connect(autocommit=False)
    c.execute(f"set transaction isolation level {level}".encode())
    c.execute("select count(*) from postbus.stream")
    return c


@pytest.fixture
def c(db: Database) -> Connection:
    return db.connect()


@pytest.fixture
def small(c: Connection) -> Connection:
    """A stream with two segments that turn at every upkeep, and one group."""
    stream(c, segments=2, retain="0 seconds", rotate_every="1 millisecond")
    group(c)
    return c


# Producers.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("early_xid", [False, True])
def test_producer_with_an_old_snapshot(db: Database, c: Connection, level: str, early_xid: bool) -> None:
    stream(c, lanes=2)
    group(c, ordering="stream")
    a = begin(db, level)
    if early_xid:
        a.execute("select pg_current_xact_id()")
    for i in range(3):
        publish(c, f"other {i}", key="k")
        assert take(c) == [f"other {i}"]
    publish(a, "old 1", key="k")
    publish(c, "other 3", key="k")
    assert take(c) == ["other 3"]
    publish(a, "old 2", key="k")
    a.commit()
    assert take(c) == ["old 1", "old 2"]
    assert take(c) == []


@pytest.mark.parametrize("level", LEVELS)
def test_savepoint_rollback(db: Database, c: Connection, level: str) -> None:
    stream(c)
    group(c)
    a = begin(db, level)
    a.execute("savepoint one")
    publish(a, "gone")
    a.execute("rollback to savepoint one")
    publish(a, "kept")
    a.execute("savepoint two")
    publish(a, "kept too")
    assert take(c) == []
    a.execute("release savepoint two")
    a.commit()
    assert take(c) == ["kept", "kept too"]


@pytest.mark.parametrize("level", LEVELS)
def test_prepared_transactions(db: Database, c: Connection, level: str) -> None:
    if value(c, "select current_setting('max_prepared_transactions')::int") < 2:
        pytest.skip("the server has max_prepared_transactions below 2")
    stream(c)
    group(c)
    names = [f"{db.name} kept", f"{db.name} gone"]
    try:
        for name in names:
            a = begin(db, level)
            a.execute("set local postbus.notify = off")
            publish(a, name)
            a.execute(f"prepare transaction '{name}'".encode())
        for i in range(5):
            publish(c, f"other {i}")
            assert take(c) == [f"other {i}"]
            maintain(c)
        c.execute(f"commit prepared '{names[0]}'".encode())
        assert take(c) == [names[0]]
        c.execute(f"rollback prepared '{names[1]}'".encode())
        publish(c, "last")
        assert take(c) == ["last"]
    finally:
        for (gid,) in c.execute(
            "select gid from pg_prepared_xacts where database = current_database()"
        ).fetchall():
            c.execute(f"rollback prepared '{gid}'".encode())


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_producer_older_than_a_rotation(db: Database, small: Connection, level: str) -> None:
    old = leaf(small)
    a = begin(db, level)
    publish(small, "first")
    rotate(small)
    publish(a, "old")
    assert value(a, "select leaf from postbus.log where payload = 'old'") == old
    publish(small, "second")
    assert take(small) == ["first", "second"]
    maintain(small, 5)
    a.commit()
    assert take(small) == ["old"]
    wait_for(lambda: (maintain(small), rows_in(small, old) == 0)[1], "cleaning")


def test_producer_older_than_rotations_and_cleaning(db: Database, small: Connection) -> None:
    """Its leaf was emptied and is in use again, or is about to be, when it publishes."""
    old = leaf(small)
    a = begin(db, "repeatable read")
    cleaned = 0
    for i in range(6):
        publish(small, f"round {i}")
        assert take(small) == [f"round {i}"]
        cleaned += maintain(small, 4).get("clean", 0)
        time.sleep(0.002)
    assert cleaned >= 2
    publish(a, "old")
    assert value(a, "select leaf from postbus.log where payload = 'old'") == old
    for i in range(6):
        publish(small, f"later {i}")
        assert take(small) == [f"later {i}"]
        maintain(small, 4)
        time.sleep(0.002)
    a.commit()
    assert take(small) == ["old"]


# Upkeep.


def test_pg_dump_postpones_cleaning_and_nobody_waits(db: Database, small: Connection) -> None:
    publish(small, "first")
    old = leaf(small)
    dump = begin(db, "repeatable read")
    dump.execute("lock table postbus.log in access share mode")
    rotate(small)
    publish(small, "second")
    assert take(small) == ["first", "second"]
    producer = db.connect()
    producer.execute("set lock_timeout = '20ms'")
    end = time.monotonic() + 1.0
    done: dict[str, int] = {}
    published = 0
    while time.monotonic() < end:
        for step, n in maintain(small).items():
            done[step] = done.get(step, 0) + n
        publish(producer, f"more {published}")
        published += 1
    assert "clean" not in done
    assert rows_in(small, old) > 0
    dump.rollback()
    assert len(take(small)) == published
    wait_for(lambda: (maintain(small), rows_in(small, old) == 0)[1], "cleaning")


def test_new_segments_beside_open_producers_and_a_dump(db: Database, small: Connection) -> None:
    """Making tables neither waits for open transactions nor makes a producer wait."""
    a = begin(db)
    publish(a, "open")
    dump = begin(db, "repeatable read")
    dump.execute("lock table postbus.log in access share mode")
    small.execute("set lock_timeout = '100ms'")
    alter(small, segments=4)
    stream(small, "another", segments=3)
    publish(small, "more")
    publish(small, "other", to="another")
    publish(a, "open still")
    a.commit()
    assert sorted(take(small)) == ["more", "open", "open still"]


@pytest.mark.parametrize("prepare", [False, True], ids=["simple protocol", "extended protocol"])
def test_upkeep_over_either_protocol(small: Connection, prepare: bool) -> None:
    done: set[str] = set()
    for i in range(10):
        publish(small, f"e{i}")
        assert take(small) == [f"e{i}"]
        time.sleep(0.002)
        done |= {r[1] for r in small.execute("select * from postbus.maintain()", prepare=prepare).fetchall()}
    assert {"rotate", "clean"} <= done


def test_upkeep_in_a_transaction_truncates_nothing(db: Database, small: Connection) -> None:
    """Its locks would last as long as the transaction."""
    publish(small, "first")
    assert take(small) == ["first"]
    rotate(small)
    publish(small, "second")
    a = begin(db)
    a.execute("select pg_current_xact_id()")
    for _ in range(5):
        maintain(a)
    publish(small, "third")
    small.execute("set lock_timeout = '20ms'")
    assert take(small) == ["second", "third"]
    held = value(
        a, "select count(*) from pg_locks where pid = pg_backend_pid() and mode = 'AccessExclusiveLock'"
    )
    assert held == 0
    a.rollback()


DAMAGES = {
    "reader": "drop function postbus._due_{id}_{ring}",
    "leaf": "drop table postbus.log_{leaf}",
    "old leaf": "drop table postbus.log_{other}",
    "sequence": "drop sequence postbus.id_{id} cascade",
    "ticks": "delete from postbus.tick where stream_id = {id}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_broken_stream_does_not_stop_the_others(c: Connection, damage: str) -> None:
    for name in ["good", "bad", "fine"]:
        stream(c, name, segments=3, retain="0 seconds", rotate_every="1 millisecond")
        group(c, of=name)
        publish(c, "first", to=name)
        assert take(c, of=name) == ["first"]
    publish(c, "second", to="bad")
    row = c.execute("select s.id, s.ring, s.leaf, g.leaf from postbus.stream s join postbus.segment g"
        " on g.stream_id = s.id and g.leaf <> s.leaf where s.name = 'bad' limit 1").fetchone()  # fmt: skip
    assert row is not None
    c.execute(DAMAGES[damage].format(id=row[0], ring=row[1], leaf=row[2], other=row[3]).encode())
    problems, cleaned = set(), set()
    for i in range(20):
        for name in ["good", "fine"]:
            publish(c, f"next {i}", to=name)
        for object_, step, _, problem in c.execute("select * from postbus.maintain()").fetchall():
            if problem is not None:
                problems.add(object_)
            elif step == "clean":
                cleaned.add(object_)
        for name in ["good", "fine"]:
            assert take(c, of=name) == [f"next {i}"]
    assert "bad" in problems, f"problems of {problems}"
    assert not {"good", "fine"} & problems
    assert {"good", "fine"} <= cleaned


# Consumers.


def test_rolled_back_consume_and_ack_come_again(db: Database, c: Connection) -> None:
    stream(c)
    group(c)
    publish(c, "first")
    a = begin(db)
    assert take(a) == ["first"]
    a.rollback()
    assert take(c) == ["first"]
    assert take(c) == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    "call",
    [
        "select postbus.consume('s', 'g')",
        "select postbus.tick('s')",
        "select postbus.maintain()",
        "select postbus.seek('s', 'g', 'earliest')",
        "select postbus.create_group('s', 'h')",
        "select postbus.alter_stream('s', '{\"lanes\": 5}')",
    ],
)
def test_old_snapshots_are_refused(db: Database, c: Connection, level: str, call: str) -> None:
    stream(c)
    group(c)
    a = begin(db, level)
    with pytest.raises(psycopg.Error) as e:
        a.execute(call.encode())
    assert e.value.sqlstate == "PB003"
    assert e.value.diag.message_hint
    assert "READ COMMITTED" in e.value.diag.message_hint


@pytest.mark.parametrize(
    "call",
    [
        "select postbus.ack(%s::text)",
        "select postbus.ack(array[%s::text])",
        "select postbus.nack(%s::text)",
        "select postbus.extend(%s::text)",
        "select postbus.dead_letter(%s::text)",
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_late_call_with_a_stale_snapshot_fails(db: Database, c: Connection, call: str, whole: bool) -> None:
    """The lease was taken back after the snapshot: not a silent success, whatever is asked."""
    stream(c)
    group(c)
    publish(c, "first")
    ((_, receipt, _),) = consume(c, lease="1 millisecond")
    if whole:
        receipt = receipt.split(":")[0]
    stale, late = begin(db, "repeatable read"), begin(db)
    time.sleep(0.01)
    ((_, now, attempt),) = consume(c)
    assert attempt == 2
    with pytest.raises(errors.SerializationFailure):
        stale.execute(call.encode(), [receipt])
    with pytest.raises(psycopg.Error) as e:
        late.execute(call.encode(), [receipt])
    assert e.value.sqlstate == "PB004"
    assert ack(c, now) == 1
    assert take(c) == []


@pytest.mark.parametrize("ordering", ["stream", "key", "none"])
def test_expired_messages_come_before_what_waits_behind_them(c: Connection, ordering: str) -> None:
    """A message that waits its turn does not overtake an earlier one whose lease ran out."""
    stream(c)
    group(c, ordering=ordering)
    for i in range(4):
        publish(c, f"m{i}", key="k")
    rows = consume(c, 4)
    c.execute("select postbus.nack(%s::text[], '0 seconds')", [[r[1] for r in rows]])
    first = consume(c, 1, "1 millisecond")
    assert [r[0] for r in first] == ["m0"]
    time.sleep(0.01)
    again = take(c, 1)
    assert sorted(again) == ["m0", "m1", "m2", "m3"]
    if ordering != "none":
        assert again == sorted(again)


def test_every_form_of_receipt(c: Connection) -> None:
    """One message or its batch, alone or in an array, for every verb."""
    stream(c)
    group(c, backoff=0)
    publish(c, "first")
    publish(c, "second")
    rows = consume(c)
    batch = rows[0][1].split(":")[0]
    for receipt in [batch, rows[0][1]]:
        c.execute("select postbus.extend(%s::text, '1 hour')", [receipt])
        c.execute("select postbus.extend(array[%s::text], '1 hour')", [receipt])
    assert value(c, "select postbus.nack(%s::text, '0 seconds')", batch) == 2
    rows = consume(c)
    assert [r[2] for r in rows] == [2, 2]
    assert value(c, "select postbus.dead_letter(array[%s::text])", rows[0][1].split(":")[0]) == 2
    assert value(c, "select postbus.redrive('s')") == 2
    rows = consume(c)
    assert (
        value(c, "select postbus.ack(array[%s::text, %s::text])", rows[0][1].split(":")[0], rows[1][1]) == 2
    )
    assert take(c) == []


def test_the_clock_can_be_moved(c: Connection) -> None:
    stream(c)
    group(c)
    publish(c, "first")
    c.execute("select postbus.publish('s', 'later', deliver_at => now() + interval '1 day')")
    ((_, receipt, _),) = consume(c, lease="1 hour")
    assert consume(c) == []
    c.execute("select set_config('postbus.fake_now', (now() + interval '2 hours')::text, false)")
    rows = consume(c, lease="1 hour")
    assert [(r[0], r[2]) for r in rows] == [("first", 2)]
    with pytest.raises(psycopg.Error) as e:
        ack(c, receipt)
    assert e.value.sqlstate == "PB004"
    ack(c, rows[0][1])
    assert take(c) == []
    c.execute("select set_config('postbus.fake_now', (now() + interval '25 hours')::text, false)")
    assert take(c) == ["later"]


# Rings, lanes and positions.


def test_the_ring_grows_under_readers(db: Database, small: Connection) -> None:
    publish(small, "e0")
    rotate(small)
    alter(small, segments=5)
    a = begin(db)
    publish(a, "open")
    for i in range(1, 4):
        publish(small, f"e{i}")
        maintain(small, 2)
    leaves = value(
        small, "select count(*) from postbus.segment g join postbus.stream s on s.id = g.stream_id"
    )
    assert leaves == 5
    assert take(small, 2) == [f"e{i}" for i in range(4)]
    a.commit()
    assert take(small) == ["open"]
    used = set()
    for i in range(12):
        publish(small, f"f{i}")
        used.add(rotate(small))
        assert take(small, 3) == [f"f{i}"]
    assert len(used) > 2


def test_new_leaves_and_streams_beside_an_open_producer(db: Database, small: Connection) -> None:
    """A transaction that has published before knows of what was made since."""
    a = begin(db)
    publish(a, "first")
    alter(small, segments=4)
    for i in range(4):
        publish(small, f"other {i}")
        maintain(small, 3)
    stream(small, "new")
    group(small, of="new")
    publish(a, "second")
    a.execute("select postbus.publish_batch('s', array['third', 'fourth'])")
    publish(a, "hello", to="new")
    a.commit()
    mine = ["first", "second", "third", "fourth"]
    got = take(small)
    assert [e for e in got if e in mine] == mine
    assert [e for e in got if e not in mine] == [f"other {i}" for i in range(4)]
    assert take(small, of="new") == ["hello"]


def test_position_lost_after_max_retain(c: Connection) -> None:
    stream(c, segments=2, retain="0 seconds", max_retain="1 hour", rotate_every="1 millisecond")
    group(c)
    group(c, "other")
    for i in range(3):
        publish(c, f"old {i}")
    assert len(take(c, by="other")) == 3
    rotate(c)
    c.execute("select set_config('postbus.fake_now', (now() + interval '2 hours')::text, false)")
    publish(c, "new")
    assert take(c, by="other") == ["new"]
    wait_for(lambda: maintain(c).get("clean", 0) > 0, "cleaning")
    with pytest.raises(psycopg.Error) as e:
        consume(c)
    assert e.value.sqlstate == "PB005"
    assert "seek" in (e.value.diag.message_hint or "")
    c.execute("select postbus.seek('s', 'g', 'earliest')")
    left = take(c)
    assert left in (["new"], [])
    publish(c, "newer")
    assert take(c) == ["newer"]


KEYS = [f"k{i}" for i in range(24)]


@pytest.mark.parametrize("ordering", ["stream", "key", "none"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("lanes", [8, 2])
def test_lane_change_in_an_open_transaction(
    db: Database, c: Connection, ordering: str, end: str, lanes: int
) -> None:
    """Events published while a lane change is open, or rolled back, are not in lanes that nobody reads."""
    stream(c, lanes=3)
    group(c, ordering=ordering)
    expected, got = [], []
    a = begin(db)
    publish(a, "open", key=KEYS[0])
    for turn in range(6):
        if turn == 1:
            changer = begin(db)
            alter(changer, lanes=lanes)
        if turn == 3:
            changer.execute(end.encode())
            if end == "rollback":
                alter(c, lanes=lanes)
        for key in KEYS:
            publish(c, f"{key} {turn}", key=key)
            expected.append(f"{key} {turn}")
        maintain(c)
        got += take(c, 7)
    a.commit()
    got += take(c)
    assert sorted(got) == sorted([*expected, "open"])
    if ordering != "none":
        for key in KEYS:
            turns = [int(e.split()[1]) for e in got if e.startswith(f"{key} ")]
            assert turns == sorted(turns)


@pytest.mark.parametrize("ordering", ["key", "none"])
@pytest.mark.parametrize("lanes", [(3, 8), (8, 3), (1, 4)])
def test_lane_change_of_keyless_events(c: Connection, ordering: str, lanes: tuple[int, int]) -> None:
    """Lanes come past the change one after the other: the next lane must not read what the last one has."""
    stream(c, lanes=lanes[0])
    group(c, ordering=ordering)
    expected, got = [], []
    for turn in range(30):
        if turn == 5:
            alter(c, lanes=lanes[1])
        publish(c, f"e{turn}")
        c.execute("select postbus.publish_batch('s', array[%s, %s])", [f"e{turn} b", f"e{turn} c"])
        expected += [f"e{turn}", f"e{turn} b", f"e{turn} c"]
        rows = consume(c, 1)
        ack(c, *[r[1] for r in rows])
        got += [r[0] for r in rows]
        if turn % 3 == 0:
            got += take(c)
    got += take(c)
    assert sorted(got) == sorted(expected)


def test_lane_changes_let_ticks_go(c: Connection) -> None:
    """A group with total order does not keep every tick since the first lane change."""
    stream(c, lanes=3)
    group(c, ordering="stream")
    group(c, "h")
    alter(c, lanes=2)
    ticks = []
    for turn in range(40):
        publish(c, f"e{turn}", key="k")
        take(c)
        take(c, by="h")
        maintain(c, 2)
        ticks.append(value(c, "select count(*) from postbus.tick where total is null"))
    assert max(ticks) < 10


@pytest.mark.parametrize("what", ["create_group", "seek"])
def test_open_placement_keeps_its_tick(db: Database, c: Connection, what: str) -> None:
    stream(c)
    group(c)
    group(c, "h")
    publish(c, "first")
    take(c)
    a = begin(db)
    if what == "seek":
        a.execute("select postbus.seek('s', 'h', 'latest')")
    else:
        a.execute("select postbus.create_group('s', 'i', '{\"start\": \"latest\"}')")
    name = "h" if what == "seek" else "i"
    if what == "create_group":
        c.execute("select postbus.drop_group('s', 'h')")
    for i in range(5):
        publish(c, f"next {i}")
        take(c)
        maintain(c, 3)
    a.commit()
    assert take(c, by=name) == [f"next {i}" for i in range(5)]
