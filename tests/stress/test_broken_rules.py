"""A test that cannot fail proves nothing: break each rule of the engine and see the fault.

Every schedule runs twice, on the intact engine (nothing is wrong) and on the broken one (the fault is there).
Where the random stress can find the fault, it has to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pytest

from tests.conftest import Database
from tests.stress import broken
from tests.stress.conftest import FreshDatabase
from tests.stress.harness import Plan, Stress
from tests.stress.sessions import (
    Connection,
    ack,
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
    wait_until_blocked,
)

Patch = Callable[[Connection], None]


def intact(c: Connection) -> None:
    """The engine as it is."""


def setup(db: Database, patch: Patch) -> Connection:
    c = db.connect()
    stream(c)
    group(c)
    patch(c)
    return c


# Own xid.


def follow_up_after_consume(db: Database, patch: Patch) -> list[str]:
    """A transaction that has an xid consumes, and only then publishes."""
    b = setup(db, patch)
    a = db.connect(autocommit=False)
    a.execute("select pg_current_xact_id()")
    publish(b, "first")
    assert take(a) == ["first"]
    publish(a, "follow-up")
    a.commit()
    return take(b)


def test_own_xid_is_part_of_the_snapshot(db: Database) -> None:
    assert follow_up_after_consume(db, intact) == ["follow-up"]


def test_without_own_xid_a_follow_up_is_lost(db: Database) -> None:
    assert follow_up_after_consume(db, broken.without_own_xid) == []


# The lower bound.


def open_while_ticked(db: Database, patch: Patch) -> set[str]:
    """Events with ids below the sequence at the tick, of transactions that began after every completed one.

    Several rounds: somebody else's transaction that ends at the wrong moment makes an event "late" instead.
    """
    b = setup(db, patch)
    missing = set()
    for i in range(10):
        publish(b, f"before {i}")
        a = db.connect(autocommit=False)
        publish(a, f"open {i}")
        got = consume(b)
        a.commit()
        ack(b, *[r[1] for r in got])
        seen = [r[0] for r in got] + take(b)
        missing |= {f"before {i}", f"open {i}"} - set(seen)
        a.close()
    return missing


def test_floor_is_below_every_fresh_event(db: Database) -> None:
    assert open_while_ticked(db, intact) == set()


def test_floor_from_the_sequence_loses(db: Database) -> None:
    assert any(m.startswith("open") for m in open_while_ticked(db, broken.floor_from_sequence))


def merged_window(db: Database, patch: Patch) -> list[str]:
    """An event that is fresh for the whole window, but late for the part of it in which it became visible."""
    b = setup(db, patch)
    a = db.connect(autocommit=False)
    publish(a, "open")
    publish(b, "second")
    value(b, "select postbus.tick('s')")
    a.commit()
    publish(b, "third")
    value(b, "select postbus.tick('s')")
    return take(b)


def test_merged_window_starts_at_the_floor_of_its_base(db: Database) -> None:
    assert merged_window(db, intact) == ["open", "second", "third"]


def test_least_first_id_of_merged_windows_loses(db: Database) -> None:
    assert merged_window(db, broken.floor_from_first_ids) == ["second", "third"]


# Due.


def commit_after_tick(db: Database, patch: Patch) -> tuple[list[str], list[str]]:
    """What can be had when the last open transaction has committed, and when somebody publishes again."""
    b = setup(db, patch)
    a = db.connect(autocommit=False)
    publish(a, "open")
    publish(b, "second")
    assert take(b) == ["second"]
    a.commit()
    at_once = take(b)
    publish(b, "third")
    return at_once, take(b)


def test_due_when_a_transaction_commits(db: Database) -> None:
    assert commit_after_tick(db, intact) == (["open"], ["third"])


def test_due_by_sequence_leaves_events_stuck(db: Database) -> None:
    assert commit_after_tick(db, broken.due_by_sequence) == ([], ["open", "third"])


# Isolation levels.


def consume_with_old_snapshot(db: Database, patch: Patch) -> list[str]:
    """Consume in a snapshot from before another worker's ack."""
    b = setup(db, patch)
    maintain(b, 3)
    publish(b, "first")
    a = db.connect(autocommit=False)
    a.execute("set transaction isolation level repeatable read")
    a.execute("select 1")
    assert take(b) == ["first"]
    publish(b, "second")
    assert take(b) == ["second"]
    # Old positions are deleted in time; what is left does not stand in the way of the old snapshot.
    maintain(b, 3)
    again = take(a)
    a.commit()
    return again


def test_consume_refuses_repeatable_read(db: Database) -> None:
    with pytest.raises(psycopg.Error) as e:
        consume_with_old_snapshot(db, intact)
    assert e.value.sqlstate == "PB003"
    assert e.value.diag.message_hint


def test_consume_in_repeatable_read_delivers_again(db: Database) -> None:
    assert consume_with_old_snapshot(db, broken.any_isolation_level) == ["first"]


# Cleaning.


def straggler(db: Database, patch: Patch) -> tuple[Connection, Connection, int]:
    """A producer with a snapshot older than the rotation has written into a leaf that is done with."""
    c = db.connect()
    stream(c, segments=2, retain="0 seconds", rotate_every="1 millisecond")
    group(c)
    broken.patient_cleaner(c)
    patch(c)
    old = leaf(c)
    s = db.connect(autocommit=False)
    s.execute("set transaction isolation level repeatable read")
    s.execute("select 1")
    publish(c, "first")
    # An open reader keeps the old leaf from being cleaned before the straggler comes.
    keep = db.connect(autocommit=False)
    keep.execute(f"lock table postbus.log_{old} in access share mode".encode())
    rewrite_timeout(c, "10ms")
    rotate(c)
    publish(c, "second")
    assert sorted(take(c)) == ["first", "second"]
    publish(s, "straggler")
    assert value(s, "select leaf from postbus.log where payload = 'straggler'") == old
    keep.rollback()
    rewrite_timeout(c, "10s")
    return c, s, old


def rewrite_timeout(c: Connection, to: str) -> None:
    c.execute(f"alter function postbus._clean_leaf(postbus.stream, int) set lock_timeout = '{to}'".encode())


def clean_while_straggler_commits(db: Database, patch: Patch) -> list[str]:
    c, s, old = straggler(db, patch)
    cleaner = db.connect()
    done = threading.Event()

    def clean() -> None:
        cleaner.execute("select * from postbus.maintain()")
        done.set()

    thread = threading.Thread(target=clean)
    thread.start()
    try:
        wait_until_blocked(c, cleaner)
        s.commit()
        assert done.wait(20)
    finally:
        thread.join()
    got = take(c)
    # Either way the leaf is emptied once nobody needs it.
    wait_for(lambda: (maintain(c), rows_in(c, old) == 0)[1], "cleaning")
    return got


def test_cleaner_checks_under_its_lock(db: Database) -> None:
    assert clean_while_straggler_commits(db, intact) == ["straggler"]


def test_cleaner_that_checks_before_its_lock_truncates_committed_events(db: Database) -> None:
    assert clean_while_straggler_commits(db, broken.check_before_lock) == []


def clean_with_old_snapshot(db: Database, patch: Patch) -> list[str]:
    """The cleaner's transaction has a snapshot from before the straggler's commit."""
    c, s, old = straggler(db, patch)
    cleaner = db.connect(autocommit=False)
    cleaner.execute("set transaction isolation level repeatable read")
    cleaner.execute("select 1")
    s.commit()
    cleaner.execute("select * from postbus.maintain()")
    cleaner.execute("select postbus._clean_leaf(s, %s) from postbus.stream s", [old])
    cleaner.commit()
    return take(c)


def test_upkeep_refuses_repeatable_read(db: Database) -> None:
    with pytest.raises(psycopg.Error) as e:
        clean_with_old_snapshot(db, intact)
    assert e.value.sqlstate == "PB003"


def test_cleaner_with_an_old_snapshot_truncates_committed_events(db: Database) -> None:
    assert clean_with_old_snapshot(db, broken.any_isolation_level) == []


# The random stress finds what it can find.


def one_busy_worker(seed: int) -> Plan:
    """It cuts every tick, most of them inside its own transactions; one producer is open till the end."""
    plan = Plan(seed, 1.5, producers=4, workers=1, groups={"total": "stream"}, upkeep=False, straggler=True)
    plan.transactional = 0.9
    return plan


def many_ticks(seed: int) -> Plan:
    """Upkeep cuts ticks all the time, and several groups read them at their own pace."""
    return Plan(seed, 2.5, producers=3, workers=1)


@pytest.mark.parametrize(
    ("patch", "plan"),
    [
        (broken.without_own_xid, one_busy_worker),
        (broken.floor_from_sequence, many_ticks),
        (broken.floor_from_first_ids, many_ticks),
        (broken.due_by_sequence, one_busy_worker),
    ],
)
def test_stress_finds_it(fresh: FreshDatabase, patch: Patch, plan: Callable[[int], Plan]) -> None:
    found = []
    for seed in range(1, 13):
        p = plan(seed)
        p.lanes, p.two_phase, p.kills, p.stall, p.patch = (1,), 0, False, 1.0, patch
        with fresh() as db:
            result = Stress(db.dsn, p).run()
        found.append(str(result))
        if "lost" in {v.rule for v in result.violations}:
            return
    pytest.fail("not found:\n" + "\n".join(found))
