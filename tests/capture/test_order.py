"""A consumer that upserts and deletes by key, in order, ends with the table."""

from __future__ import annotations

import contextlib
import random

import psycopg
import pytest

from tests.capture.conftest import Lab

SAME_ROW = """create function again() returns trigger language plpgsql as $$
  begin update t set a = a || '!' where id = new.id and length(a) < 4; return null; end $$"""
NEXT_ROW = """create function again() returns trigger language plpgsql as $$
  begin update t set a = a || new.id where id = new.id % 3 + 1 and length(a) < 5; return null; end $$"""
DELETES = """create function again() returns trigger language plpgsql as $$
  begin delete from t where id = new.id % 3 + 1 and a <> 'stays'; return null; end $$"""
MOVES = """create function again() returns trigger language plpgsql as $$
  begin update t set id = id + 10 where id = new.id and id < 30; return null; end $$"""
BEFORE = """create function again() returns trigger language plpgsql as $$
  begin update t set a = a || '<' where id = new.id - 1 and length(a) < 4; return new; end $$"""


def test_a_key_change_is_a_delete_and_an_insert(t: Lab) -> None:
    t.run("insert into t values (1, 'x')", "update t set id = 2, a = 'y'")
    _, deleted, inserted = t.events()
    assert (deleted["op"], deleted["event_key"], deleted["before"]) == ("delete", "1", {"id": 1, "a": "x"})
    assert (inserted["op"], inserted["event_key"], inserted["after"]) == ("insert", "2", {"id": 2, "a": "y"})
    assert inserted["before"] is None


def test_swapped_and_shifted_keys(lab: Lab) -> None:
    lab.run(
        "create table t (id int primary key deferrable, a text)",
        "select postbus.capture('t', 'cdc')",
        "insert into t select g, 'row ' || g from generate_series(1, 6) g",
        "update t set id = 3 - id where id <= 2",
    )
    lab.check("t")
    lab.run("update t set id = id + 1")
    lab.check("t")
    lab.run("update t set id = 9 - id, a = a || id")
    lab.check("t")


def test_keys_that_are_doubled_for_a_while(lab: Lab) -> None:
    lab.run(
        "create table t (id int primary key deferrable initially deferred, a text)",
        "select postbus.capture('t', 'cdc')",
        "insert into t values (1, 'x'), (2, 'y'), (3, 'z')",
    )
    with lab.conn.transaction():
        lab.run("update t set id = 2 where a = 'x'", "update t set id = 1 where a = 'y'")
        lab.run("insert into t values (3, 'new')", "delete from t where a = 'z'")
    lab.check("t")


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("body", [SAME_ROW, NEXT_ROW, DELETES, MOVES, BEFORE])
def test_triggers_that_change_their_own_table(lab: Lab, body: str, partitioned: bool) -> None:
    timing = "before" if body is BEFORE else "after"
    if partitioned:
        lab.run(
            "create table t (id int primary key, a text) partition by range (id)",
            "create table t_low partition of t for values from (0) to (3)",
            "create table t_high partition of t default",
        )
    else:
        lab.run("create table t (id int primary key, a text)")
    lab.run("select postbus.capture('t', 'cdc')")
    lab.conn.execute(body.encode())
    lab.conn.execute(
        f"create trigger a {timing} insert or update on t for each row execute function again()".encode()
    )
    lab.run("insert into t values (1, 'a'), (2, 'b'), (3, 'c')")
    lab.check("t")
    lab.run("insert into t values (4, 'd'), (5, 'stays')", "update t set a = 'u'")
    lab.check("t")
    lab.run("update t set id = id + 40 where id > 3", "delete from t where id = 1")
    lab.check("t")


def test_the_order_of_nested_statements_on_other_tables(t: Lab) -> None:
    t.run(
        "create table log (id int generated always as identity primary key, what text)",
        "select postbus.capture('log', 'cdc')",
        """create function note() returns trigger language plpgsql as $$
          begin
            insert into log (what) values (new.a);
            update t set a = 'seen' where id = new.id - 1;
            return null;
          end $$""",
        "create trigger note after insert on t for each row execute function note()",
        "insert into t values (1, 'x'), (2, 'y')",
        "insert into t values (3, 'z')",
    )
    t.check("t", "log")


def test_truncate_is_one_event_per_lane(lab: Lab) -> None:
    lab.run("select postbus.create_stream('wide', '{\"lanes\": 5}')", "create table t (id int primary key)")
    lab.run("select postbus.capture('t', 'wide')", "select nextval('postbus.id_' || id) from postbus.stream")
    lab.run("insert into t select generate_series(1, 100)", "truncate t")
    rows = lab.conn.execute(
        "select lane, key, (payload::jsonb ->> 'lane')::int, payload::jsonb -> 'lanes', "
        "postbus._lane(key, lane, 5) from postbus.log where type = 'truncate' order by lane"
    ).fetchall()
    assert rows == [(lane, None, lane, 5, lane) for lane in range(5)]


def test_truncate_cascade_and_several_tables(t: Lab) -> None:
    t.run("create table c (id int primary key, t int references t)", "select postbus.capture('c', 'cdc')")
    t.run("insert into t values (1, 'x')", "insert into c values (1, 1)", "truncate t cascade")
    assert [(e["op"], e["table"]) for e in t.events()] == [
        ("insert", "t"),
        ("insert", "c"),
        ("truncate", "t"),
        ("truncate", "c"),
    ]
    t.run("insert into t values (2, 'x')")
    t.check("t", "c")


@pytest.mark.parametrize("seed", range(3))
def test_random_statements(lab: Lab, seed: int) -> None:
    chance = random.Random(seed)
    lab.run("select postbus.drop_stream('cdc', true)")
    lab.create(lanes=4, ordering="key")
    lab.run(
        "create table t (id int, p int, a int, primary key (id, p) deferrable) partition by list (p)",
        "create table t1 partition of t for values in (1)",
        "create table t2 (a int, p int not null, id int not null)",
        "alter table t attach partition t2 for values in (2)",
        "select postbus.capture('t', 'cdc')",
    )
    statements = [
        "insert into {t} (id, p, a) select g, {p}, g from generate_series({a}, {b}) g "
        "where not exists (select from t where id = g and p = {p})",
        "update {t} set a = a + 1 where id between {a} and {b}",
        "update t set p = 3 - p where id between {a} and {b} "
        "and not exists (select from t x where x.id = t.id and x.p <> t.p)",
        "update {t} set id = {a} + {b} - id where id between {a} and {b}",
        "update {t} set id = id + 100 where id between {a} and {b} and id < 100",
        "delete from {t} where id between {a} and {b}",
        "with d as (delete from t where id = {a} and p = 1 returning *) insert into t select id, p, 0 from d",
        "truncate {t}",
    ]
    for _ in range(80):
        a = chance.randint(1, 40)
        p = chance.randint(1, 2)
        statement = chance.choices(statements, [6, 4, 4, 4, 1, 3, 2, 0.3])[0]
        text = statement.format(t=chance.choice(["t", f"t{p}"]), p=p, a=a, b=a + chance.randint(0, 10))
        with contextlib.suppress(psycopg.errors.UniqueViolation), lab.conn.transaction() as block:
            lab.conn.execute(text.encode())
            if chance.random() < 0.1:
                lab.conn.execute(b"update t set a = 0")
                raise psycopg.Rollback(block)
        if chance.random() < 0.2:
            lab.check("t")
    lab.check("t")
