"""Backfill: snapshot events and changes together give the table, whoever writes meanwhile."""

from __future__ import annotations

import random
import threading
import time

import psycopg
import pytest

from tests.capture.conftest import Lab
from tests.capture.test_manage import refused


def fill(lab: Lab, batch: int = 50) -> int:
    """Backfill table t to the end; returns the number of calls."""
    for calls in range(1, 10000):
        row = lab.conn.execute("select * from postbus.backfill('t', batch => %s)", (batch,)).fetchone()
        assert row is not None
        if row[3]:
            return calls
    raise AssertionError("backfill does not end")


def test_chunks_resume_and_end(lab: Lab) -> None:
    lab.run(
        "create table t (id int primary key, a text)",
        "insert into t select g, 'x' from generate_series(1, 25) g",
    )
    lab.run("analyze t", "select postbus.capture('t', 'cdc')")
    call = "select * from postbus.backfill('t', batch => 10)"
    assert lab.conn.execute(call).fetchall() == [(10, 10, 25, False)]
    assert lab.value("select array[backfill_done, backfill_total] from postbus.list_captures()") == [10, 25]
    assert lab.conn.execute(call).fetchall() == [(10, 20, 25, False)]
    assert lab.conn.execute(call).fetchall() == [(5, 25, 25, True)]
    assert lab.conn.execute(call).fetchall() == [(0, 25, 25, True)]
    events = lab.events()
    assert [e["event_key"] for e in events] == [str(i) for i in range(1, 26)]
    assert {e["op"] for e in events} == {"snapshot"}
    lab.check("t")
    lab.run("select postbus.backfill('t', restart => true)")
    assert len(lab.events()) == 25


@pytest.mark.parametrize(
    "key",
    [
        "a int, b text, primary key (a, b)",
        'a text collate "C", b timestamptz, primary key (b, a)',
        "a float8, b bytea, unique (b)",
    ],
)
def test_keys_of_all_kinds(lab: Lab, key: str) -> None:
    kinds = dict(part.split()[:2] for part in key.split(", ")[:2])
    made = {
        "int": "g % 7",
        "text": "chr(65 + g % 26) || g",
        "timestamptz": "now() + g * interval '1 us'",
        "float8": "g / 3.0",
        "bytea": "decode(md5(g::text), 'hex')",
    }
    lab.conn.execute(f"create table t ({key})".encode())
    values = f"{made[kinds['a']]}, {made[kinds['b']]}"
    lab.conn.execute(f"insert into t (a, b) select {values} from generate_series(1, 100) g".encode())
    lab.run("alter table t alter b set not null", "select postbus.capture('t', 'cdc')")
    assert fill(lab, 9) == 12
    assert len(lab.events()) == 100
    lab.check("t")


def test_a_table_without_a_key_is_read_at_once(lab: Lab) -> None:
    lab.run("create table t (a int)", "insert into t select g % 3 from generate_series(1, 10) g")
    lab.run("select postbus.capture('t', 'cdc')")
    with lab.db.connect(autocommit=False) as conn:
        conn.execute("insert into t values (9)")
        lab.run("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            fill(lab)
    assert fill(lab) == 1
    assert sorted(e["after"]["a"] for e in lab.events() if e["op"] == "snapshot") == [
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        2,
        2,
        2,
        9,
    ]


def test_rows_that_are_held_come_later(lab: Lab) -> None:
    lab.run(
        "create table t (id int primary key, a text)",
        "insert into t select g, 'x' from generate_series(1, 20) g",
    )
    lab.run("select postbus.capture('t', 'cdc')", "set lock_timeout = '300ms'")
    with lab.db.connect(autocommit=False) as conn:
        conn.execute("select from t where id in (3, 5, 7) for update")
        conn.execute("update t set a = 'mine' where id = 5")
        conn.execute("update t set id = 100 where id = 7")
        conn.execute("delete from t where id = 9")
        call = "select rows, finished from postbus.backfill('t', batch => 10)"
        assert [lab.conn.execute(call).fetchone() for _ in range(3)] == [(6, False), (10, False), (0, False)]
        assert "3" not in [e["event_key"] for e in lab.events()]
        # Nothing else is left: it waits for the holder, and only then.
        with pytest.raises(psycopg.errors.LockNotAvailable):
            lab.run("select postbus.backfill('t')")
    fill(lab)
    lab.check("t")
    assert lab.value("select skipped from postbus.backfill_state") == []


def test_backfill_needs_a_capture_and_read_committed(t: Lab) -> None:
    t.run("create table other (id int primary key)", "select postbus.create_stream('two')")
    with refused("PB001", "not captured"):
        t.run("select postbus.backfill('other')")
    t.run("select postbus.capture('t', 'two')")
    with refused("PB003", "several streams"):
        t.run("select postbus.backfill('t')")
    with refused("PB003", "READ COMMITTED"), t.conn.transaction():
        t.run("set transaction isolation level repeatable read", "select postbus.backfill('t', 'two')")


STATEMENTS = [
    "insert into {t} select g, {p}, 0 from generate_series({a}, {b}) g on conflict do nothing",
    "insert into {t} values ({a}, {p}, 1) on conflict (id, p) do update set n = t.n + 1",
    "update {t} set n = n + 1 where id between {a} and {b}",
    "update {t} set n = n + 1 where id = {a}",
    "update {t} set id = id + 1000 where id between {a} and {b} and id < 1000 and p = {p}",
    "update {t} set id = {b} where id = {a}",
    "update {t} set p = 3 - p where id = {a}",
    "delete from {t} where id between {a} and {b}",
    "select from {t} where id between {a} and {b} for update",
]


def write(lab: Lab, seed: int, stop: threading.Event, problems: list[BaseException]) -> None:
    """Change table t at random until told to stop. Writers may be in each other's way."""
    chance = random.Random(seed)
    try:
        with psycopg.connect(lab.db.dsn, autocommit=True) as conn:
            conn.execute("set lock_timeout = '300ms'")
            while not stop.is_set():
                try:
                    with conn.transaction() as block:
                        for _ in range(chance.randint(1, 3)):
                            a = chance.randint(1, 700)
                            b = a + chance.choice([0, 1, 2, 30])
                            statement = chance.choice(STATEMENTS).format(
                                t="t", p=chance.randint(1, 2), a=a, b=b
                            )
                            conn.execute(statement.encode())
                            if chance.random() < 0.3:
                                time.sleep(chance.random() / 50)
                        if chance.random() < 0.1:
                            raise psycopg.Rollback(block)
                except (psycopg.errors.UniqueViolation, psycopg.errors.SerializationFailure):
                    pass
                except (psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable):
                    pass
    except BaseException as problem:
        problems.append(problem)


@pytest.mark.parametrize(("seed", "partitioned"), [(1, False), (2, True), (3, False), (4, True)])
def test_writers_go_on_all_through_a_backfill(lab: Lab, seed: int, partitioned: bool) -> None:
    lab.run("select postbus.drop_stream('cdc', true)")
    lab.create(lanes=3, ordering="key" if seed % 4 < 2 else "stream")
    if partitioned:
        lab.run(
            "create table t (id int, p int, n int, primary key (id, p)) partition by list (p)",
            "create table t1 partition of t for values in (1)",
            "create table t2 partition of t for values in (2)",
        )
    else:
        lab.run("create table t (id int, p int, n int, primary key (id, p))")
    lab.run("insert into t select g, g % 2 + 1, 0 from generate_series(1, 600) g")
    stop = threading.Event()
    problems: list[BaseException] = []
    writers = [threading.Thread(target=write, args=(lab, seed * 10 + i, stop, problems)) for i in range(4)]
    for writer in writers:
        writer.start()
    try:
        time.sleep(0.1)
        lab.run("select postbus.capture('t', 'cdc')")
        assert fill(lab, 20) > 5
        time.sleep(0.2)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert problems == []
    lab.check("t")
