"""What an event looks like, whatever the statement, the names and the types."""

from __future__ import annotations

from decimal import Decimal

import psycopg
import pytest
from psycopg.errors import SerializationFailure

from tests.capture.conftest import Lab


def test_events_carry_op_key_before_and_after(t: Lab) -> None:
    t.run("insert into t values (1, 'x')", "update t set a = 'y'", "delete from t")
    inserted, updated, deleted = t.events()
    assert inserted == {
        "event_key": "1",
        "op": "insert",
        "schema": "public",
        "table": "t",
        "key": {"id": 1},
        "before": None,
        "after": {"id": 1, "a": "x"},
        "txid": inserted["txid"],
    }
    assert (updated["before"], updated["after"]) == ({"id": 1, "a": "x"}, {"id": 1, "a": "y"})
    assert (deleted["before"], deleted["after"]) == ({"id": 1, "a": "y"}, None)
    assert inserted["txid"].isdigit()


def test_statements_without_rows_publish_nothing(t: Lab) -> None:
    t.run("insert into t select 1, 'x' where false", "update t set a = 'y'", "delete from t where id = 5")
    assert t.events() == []
    with t.conn.transaction():
        t.run("update t set a = 'z'")
        assert t.value("select pg_current_xact_id_if_assigned()") is None


def test_many_rows_in_one_statement_keep_their_order(t: Lab) -> None:
    t.run("insert into t select g, 'x' from generate_series(1, 2000) g", "update t set a = id::text")
    events = t.events()
    assert [e["event_key"] for e in events[:2000]] == [str(i) for i in range(1, 2001)]
    assert {e["op"] for e in events[2000:]} == {"update"}
    assert all(
        e["before"]["id"] == e["after"]["id"] and e["after"]["a"] == e["event_key"] for e in events[2000:]
    )
    t.check("t")


def test_a_plan_made_for_one_row_serves_many(t: Lab) -> None:
    t.run("insert into t select g, 'x' from generate_series(1, 20000) g")
    t.run("set statement_timeout = '20s'")
    for i in range(1, 8):
        t.conn.execute("update t set a = 'y' where id = %s", (i,))
    t.run("update t set a = 'z'")
    assert t.value("select count(*) from postbus.log where type = 'update'") == 20007


def test_copy_ctes_upserts_and_returning(t: Lab) -> None:
    with t.conn.cursor().copy("copy t from stdin") as copy:
        for i in range(3):
            copy.write_row((i, f"copied {i}"))
    t.run("insert into t values (1, 'u'), (9, 'n') on conflict (id) do update set a = excluded.a || t.a")
    t.run("insert into t values (1, 'ignored') on conflict do nothing")
    t.run("with d as (delete from t where id = 0 returning *) insert into t select id, 'again' from d")
    t.run(
        "with u as (update t set a = 'cte' where id = 2 returning *) insert into t select id + 20, a from u"
    )
    assert t.brief() == [
        *("insert 0", "insert 1", "insert 2"),
        *("update 1", "insert 9", "delete 0", "insert 0", "update 2", "insert 22"),
    ]
    t.check("t")


def test_merge(t: Lab, pg_major: int) -> None:
    if pg_major < 15:
        pytest.skip("MERGE is new in PostgreSQL 15")
    t.run("insert into t select g, 'x' from generate_series(1, 4) g")
    t.run("""merge into t using (values (1, 'del'), (2, 'upd'), (3, 'key'), (7, 'ins')) s (id, what)
      on s.id = t.id
      when matched and what = 'del' then delete
      when matched and what = 'upd' then update set a = 'merged'
      when matched then update set id = 1
      when not matched then insert values (s.id, 'merged')""")
    assert t.brief()[4:] == ["delete 1", "delete 3", "update 2", "insert 1", "insert 7"]
    t.check("t")


def test_foreign_key_cascades(lab: Lab) -> None:
    lab.run(
        "create table p (id int primary key)",
        "create table c (id int primary key, p int references p on delete cascade on update cascade)",
        "create table tree (id int primary key, up int references tree on delete cascade on update cascade)",
        "select postbus.capture(x::regclass, 'cdc') from unnest(array['p', 'c', 'tree']) x",
        "insert into p values (1), (2)",
        "insert into c values (10, 1), (11, 1), (20, 2)",
        "insert into tree values (1, null), (2, 1), (3, 2), (4, 1)",
    )
    lab.run("update p set id = id + 5", "delete from p where id = 6")
    lab.run("update tree set id = id + 10 where id <= 2", "update tree set id = 100 - id")
    lab.check("p", "c", "tree")
    lab.run("delete from tree where id = 98", "delete from tree")
    lab.check("tree")
    assert [e["table"] for e in lab.events()] == []


def test_names_that_collide_with_everything(lab: Lab) -> None:
    lab.run(
        'create schema "Wëird ""S"',
        """create table "Wëird ""S"."Tä'b.le" ("N" int, n text, old_rows int, new_rows int, v int, t int,
          o int, x int, e int, j int, "select" int, "a""b" text, "k'%s" int, id_seq int,
          primary key ("N", "a""b", "k'%s"))""",
        """select postbus.capture('"Wëird ""S"."Tä''b.le"', 'cdc')""",
        """insert into "Wëird ""S"."Tä'b.le" ("N", n, v, t, j, "a""b", "k'%s")
          values (1, 'n', 2, 3, 4, 'q"', 5)""",
        """update "Wëird ""S"."Tä'b.le" set n = 'm', old_rows = 7""",
        """update "Wëird ""S"."Tä'b.le" set "N" = 2""",
    )
    first, second, third, fourth = lab.events()
    assert (first["schema"], first["table"]) == ('Wëird "S', "Tä'b.le")
    assert first["key"] == {"N": 1, 'a"b': 'q"', "k'%s": 5}
    assert first["event_key"] == '[1, "q\\"", 5]'
    assert (first["after"]["n"], first["after"]["v"], first["after"]["j"]) == ("n", 2, 4)
    assert (second["before"]["n"], second["after"]["n"], second["after"]["old_rows"]) == ("n", "m", 7)
    assert [third["op"], fourth["op"]] == ["delete", "insert"]
    lab.run("""select postbus.backfill('"Wëird ""S"."Tä''b.le"')""")
    (snapshot,) = lab.events()
    assert snapshot["after"] == fourth["after"]


def test_values_do_not_depend_on_who_writes(lab: Lab) -> None:
    lab.run("""create table v (id timestamptz primary key, n numeric, f float8, b bytea, j jsonb, js json,
      a int[], i interval, d daterange, u uuid, e text[])""")
    lab.run("select postbus.capture('v', 'cdc')")
    row = """'2024-03-01 12:00:00.123456+00', {n}, {f}, '\\x00ff', '{{"a": [1, null]}}', '{{"b":  1}}',
      '{{1,null,2}}', '1 day 02:00', '[2024-01-02,2024-02-03)',
      'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{{"x,y",null}}'"""
    lab.conn.execute(
        f"insert into v values ({row.format(n='12345678901234567890.10', f='0.1::float8 + 0.2')})".encode()
    )
    lab.run("set timezone = 'Asia/Tokyo'", "set datestyle = 'German'", "set intervalstyle = 'iso_8601'")
    lab.run("set bytea_output = 'escape'", "set extra_float_digits = -5")
    lab.run("""update v set n = 'NaN', f = '-Infinity'""")
    lab.run("reset all")
    inserted, updated = lab.events()
    assert inserted["event_key"] == updated["event_key"] == "2024-03-01T12:00:00.123456+00:00"
    same = set(inserted["after"]) - {"n", "f"}
    assert all(inserted["after"][k] == updated["after"][k] for k in same)
    assert updated["before"] == inserted["after"]
    assert (updated["after"]["n"], updated["after"]["f"]) == ("NaN", "-Infinity")
    assert inserted["after"]["f"] == 0.1 + 0.2
    assert lab.value("select payload::jsonb #>> '{after,n}' from postbus.log order by id limit 1") == str(
        Decimal("12345678901234567890.10")
    )
    assert (inserted["after"]["b"], inserted["after"]["i"]) == ("\\x00ff", "1 day 02:00:00")
    assert (inserted["after"]["a"], inserted["after"]["d"]) == ([1, None, 2], "[2024-01-02,2024-02-03)")


def test_generated_columns_are_as_stored(lab: Lab, pg_major: int) -> None:
    virtual = ", w int generated always as (id * 3) virtual" if pg_major >= 18 else ""
    lab.conn.execute(
        f"create table g (id int primary key, s int generated always as (id * 2) stored{virtual})".encode()
    )
    lab.run("insert into g values (7)", "select postbus.capture('g', 'cdc')", "insert into g values (5)")
    lab.run("select postbus.backfill('g')", "update g set id = 6 where id = 5")
    events = lab.events()
    assert sorted(e["op"] for e in events) == ["delete", "insert", "insert", "snapshot", "snapshot"]
    found = sorted(tuple(sorted(e["after"].items())) for e in events if e["after"])
    assert found == [(("id", i), ("s", 2 * i)) for i in (5, 5, 6, 7)]


def test_tables_without_a_primary_key(lab: Lab) -> None:
    lab.run(
        "create table bare (a int, b text)",
        "create table uniq (a int not null, b int, c text not null)",
        "create unique index on uniq (b)",
        "create unique index on uniq (c, a)",
        "select postbus.capture('bare', 'cdc')",
        "select postbus.capture('uniq', 'cdc')",
        "insert into bare values (1, 'x'), (1, 'x')",
        "update bare set b = 'y'",
        "delete from bare",
        "insert into uniq values (1, 2, 'c')",
        "update uniq set a = 3",
    )
    events = lab.events()
    assert [e["event_key"] for e in events] == [None] * 6 + ['["c", 1]', '["c", 1]', '["c", 3]']
    assert events[2]["key"] is None
    assert (events[2]["before"], events[2]["after"]) == ({"a": 1, "b": "x"}, {"a": 1, "b": "y"})
    assert events[8]["key"] == {"c": "c", "a": 3}


def test_include_and_exclude_keep_the_key(lab: Lab) -> None:
    lab.run(
        "create table w (id int primary key, a int, b int, secret text)",
        "select postbus.capture('w', 'cdc', exclude => array['secret', 'id'])",
        "insert into w values (1, 2, 3, 's')",
    )
    (event,) = lab.events()
    assert (event["key"], event["event_key"], event["after"]) == ({"id": 1}, "1", {"a": 2, "b": 3})
    # A renamed column stays excluded, a new one is in.
    lab.run(
        "alter table w rename secret to hidden", "alter table w add d int default 4", "update w set a = 5"
    )
    (event,) = lab.events()
    assert event["after"] == {"a": 5, "b": 3, "d": 4}
    lab.run("select postbus.uncapture('w')", "select postbus.capture('w', 'cdc', columns => array['a'])")
    lab.run("alter table w rename a to aa", "alter table w add e int", "update w set b = 6")
    (event,) = lab.events()
    assert (event["before"], event["after"]) == ({"aa": 5}, {"aa": 5})
    lab.run("alter table w drop aa", "delete from w")
    assert [e["before"] for e in lab.events()] == [{}]


def test_schema_changes_need_no_new_capture(t: Lab) -> None:
    t.run("insert into t values (1, 'x')", "alter table t add b int default 3", "update t set a = 'y'")
    t.run("alter table t drop a", "update t set b = 4", "alter table t rename id to nr", "update t set b = 5")
    t.run(
        "alter table t rename to tt",
        "create schema s",
        "alter table tt set schema s",
        "update s.tt set nr = 2",
    )
    events = t.events()
    assert [e["after"] for e in events if e["op"] == "update"] == [
        {"id": 1, "a": "y", "b": 3},
        {"id": 1, "b": 4},
        {"nr": 1, "b": 5},
    ]
    assert [(e["op"], e["schema"], e["table"], e["key"]) for e in events[-2:]] == [
        ("delete", "s", "tt", {"nr": 1}),
        ("insert", "s", "tt", {"nr": 2}),
    ]
    # Another primary key is taken up by maintain().
    t.run("alter table s.tt drop constraint t_pkey", "alter table s.tt add primary key (b)")
    t.run("select postbus._maintain_captures()", "update s.tt set nr = 9")
    assert [e["key"] for e in t.events()] == [{"b": 5}]


def test_every_isolation_level_and_savepoints(t: Lab) -> None:
    for n, level in enumerate(psycopg.IsolationLevel, 1):
        with t.db.connect(autocommit=False) as conn:
            conn.isolation_level = level
            conn.execute("insert into t values (%s, 'x')", (n,))
            with conn.transaction() as inner:
                conn.execute("update t set a = 'rolled back'")
                raise psycopg.Rollback(inner)
            conn.execute("update t set a = 'y' where id = %s", (n,))
    assert t.brief() == [f"{op} {n}" for n in range(1, 5) for op in ("insert", "update")]
    t.check("t")


def test_a_snapshot_older_than_the_capture_must_try_again(lab: Lab) -> None:
    lab.run("create table t (id int primary key)")
    with lab.db.connect(autocommit=False) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("select 1")
        lab.run("select postbus.capture('t', 'cdc')")
        with pytest.raises(SerializationFailure, match="began after"):
            conn.execute("insert into t values (1)")


def test_replica_sessions_are_not_captured(t: Lab) -> None:
    t.run("set session_replication_role = replica", "insert into t values (1, 'x')")
    t.run("set session_replication_role = origin", "insert into t values (2, 'x')")
    assert t.brief() == ["insert 2"]


def test_writers_need_no_rights_on_postbus(t: Lab) -> None:
    t.run(
        "drop role if exists capture_writer",
        "create role capture_writer",
        "grant insert on t to capture_writer",
    )
    try:
        t.run("set role capture_writer", "insert into t values (1, 'x')", "reset role")
        assert t.brief() == ["insert 1"]
    finally:
        t.run("reset role", "drop owned by capture_writer", "drop role capture_writer")


def test_a_renamed_stream_is_found(t: Lab) -> None:
    t.run("update postbus.stream set name = 'other'", "select postbus._stamp(id) from postbus.stream")
    t.run("insert into t values (1, 'x')", "update postbus.stream set name = 'cdc'")
    assert t.brief() == ["insert 1"]
