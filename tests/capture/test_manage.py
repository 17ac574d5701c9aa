"""capture, uncapture, list_captures and upkeep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.capture.conftest import Lab


@contextmanager
def refused(code: str, match: str = "") -> Iterator[None]:
    with pytest.raises(psycopg.Error, match=match) as caught:
        yield
    assert caught.value.sqlstate == code


def listed(lab: Lab) -> list[tuple[Any, ...]]:
    query = 'select "table", stream, key, columns, exclude, partitions from postbus.list_captures()'
    return lab.conn.execute(query).fetchall()


def test_capture_twice_and_to_two_streams(t: Lab) -> None:
    with refused("PB002", "already captured"):
        t.run("select postbus.capture('t', 'cdc')")
    t.run("select postbus.create_stream('two')", "select postbus.capture('t', 'two', columns => array['a'])")
    t.run("insert into t values (1, 'x')")
    assert t.value("select count(*) from postbus.log") == 2
    assert listed(t) == [
        ("public.t", "cdc", ["id"], None, None, 0),
        ("public.t", "two", ["id"], ["a"], None, 0),
    ]
    t.run("select postbus.uncapture('t', 'two')", "insert into t values (2, 'x')")
    assert t.value("select count(*) from postbus.log") == 3
    t.run("select postbus.uncapture('t')")
    assert listed(t) == []
    assert t.value("select count(*) from pg_trigger where tgrelid = 't'::regclass") == 0
    with refused("PB001", "not captured"):
        t.run("select postbus.uncapture('t')")


def test_what_cannot_be_captured(lab: Lab) -> None:
    lab.run(
        "create table t (id int primary key, a int)",
        "create view v as select * from t",
        "create materialized view m as select * from t",
        "create table p (id int) partition by list (id)",
        "create table p1 partition of p for values in (1)",
        "create temp table tmp (id int)",
    )
    for table in ("v", "m", "p1", "tmp", "postbus.stream", "pg_class", "information_schema.sql_sizing"):
        with refused("PB003", "cannot capture"):
            lab.value("select postbus.capture(%s::regclass, 'cdc')", table)
    with refused("PB001", "nosuch"):
        lab.run("select postbus.capture('t', 'nosuch')")
    with refused("PB003", "no column"):
        lab.run("select postbus.capture('t', 'cdc', exclude => array['b'])")
    with refused("PB003", "not both"):
        lab.run("select postbus.capture('t', 'cdc', array['a'], array['a'])")
    assert listed(lab) == []


def test_only_who_may_have_the_table(t: Lab) -> None:
    t.run(
        "drop role if exists capture_user",
        "create role capture_user",
        "grant usage on schema postbus to capture_user",
        "grant execute on all functions in schema postbus to capture_user",
        "create table mine (id int primary key)",
    )
    try:
        t.run("set role capture_user")
        with refused("PB007", "may not capture"):
            t.run("select postbus.capture('mine', 'cdc')")
        with refused("PB007", "may not capture"):
            t.run("select postbus.uncapture('t')")
        with refused("PB007", "may not capture"):
            t.run("select postbus.backfill('t')")
        t.run("reset role", "grant select, trigger on mine to capture_user", "set role capture_user")
        t.run("select postbus.capture('mine', 'cdc')")
    finally:
        t.run("reset role", "drop owned by capture_user", "drop role capture_user")


def test_dropping_the_stream_frees_the_table(t: Lab) -> None:
    t.run(
        "select postbus.backfill('t')",
        "select postbus.drop_stream('cdc', true)",
        "insert into t values (1, 'x')",
    )
    assert listed(t) == []
    assert t.value("select count(*) from postbus.backfill_state") == 0
    assert t.value("select count(*) from pg_trigger where tgrelid = 't'::regclass") == 0


def test_a_dropped_table_does_no_harm(t: Lab) -> None:
    t.run("drop table t")
    assert len(listed(t)) == 1
    assert t.value("select postbus._maintain_captures()") == 1
    assert listed(t) == []
    t.run("create table t (id int primary key)", "select postbus.capture('t', 'cdc')", "drop table t")
    t.run("select postbus.drop_stream('cdc', true)")


def test_triggers_without_a_capture_say_so(t: Lab) -> None:
    t.run("delete from postbus.capture")
    with refused("PB001", "gone"):
        t.run("insert into t values (1, 'x')")
    t.run("select postbus.uncapture('t')", "insert into t values (1, 'x')")


def test_a_restored_capture_goes_by_names(lab: Lab) -> None:
    lab.run(
        "create table w (gone int, id int primary key, secret int, a int)",
        "select postbus.capture('w', 'cdc', exclude => array['secret'])",
        # As after a restore: another xmin, other column numbers.
        "update postbus.capture set nos = '{4}', key_index = 1, stamp = '3'",
        "insert into w values (0, 1, 2, 3)",
    )
    assert [e["after"] for e in lab.events()] == [{"gone": 0, "id": 1, "a": 3}]
    assert lab.value("select postbus._maintain_captures()") == 1
    assert lab.value("select nos from postbus.capture where stamp = xmin") == [3]
    lab.run("update w set a = 4")
    assert [(e["event_key"], e["after"]) for e in lab.events()] == [("1", {"gone": 0, "id": 1, "a": 4})]


def test_reinstalling_keeps_captures(t: Lab) -> None:
    from postbus import engine

    engine.install(t.conn)
    t.run("insert into t values (1, 'x')")
    assert t.brief() == ["insert 1"]


def test_uninstalling_removes_the_triggers(t: Lab) -> None:
    t.run("select postbus.uninstall()", "insert into t values (1, 'x')")
    assert t.value("select count(*) from pg_trigger where tgrelid = 't'::regclass") == 0
