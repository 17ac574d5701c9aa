"""Partitioned tables and inheritance trees: whatever table a statement names, its changes come once."""

from __future__ import annotations

import pytest

from tests.capture.conftest import Lab


@pytest.fixture
def parts(lab: Lab) -> Lab:
    """A table p with partitions p1, p2 (columns in another order) and p3, which has p31 and p32."""
    lab.run(
        "create table p (id int, r int, a text, primary key (id, r)) partition by list (r)",
        "create table p1 partition of p for values in (1)",
        "create table p2 (a text, dropped int, r int not null, id int not null)",
        "alter table p2 drop dropped",
        "alter table p attach partition p2 for values in (2)",
        "create table p3 partition of p for values in (3) partition by range (id)",
        "create table p31 partition of p3 for values from (0) to (10)",
        "create table p32 partition of p3 default",
        "select postbus.capture('p', 'cdc')",
    )
    return lab


def test_statements_on_root_and_partitions_come_once(parts: Lab) -> None:
    parts.run("insert into p values (1, 1, 'x'), (2, 2, 'x'), (3, 3, 'x'), (30, 3, 'x')")
    parts.run("insert into p1 values (4, 1, 'y')", "insert into p2 (id, r, a) values (5, 2, 'y')")
    parts.run("insert into p3 values (6, 3, 'y'), (60, 3, 'y')", "insert into p32 values (61, 3, 'y')")
    events = parts.events()
    assert len(events) == 9
    assert {e["table"] for e in events} == {"p"}
    assert events[5]["after"] == {"id": 5, "r": 2, "a": "y"}
    parts.run(
        "update p set a = 'z'",
        "update p2 set a = 'zz'",
        "update p32 set a = 'zz'",
        "delete from p3 where id = 3",
    )
    assert len(parts.events()) == 9 + 2 + 3 + 1
    parts.run(
        "delete from p where id = 61", "with u as (update p1 set a = 'cte' returning *) select * from u"
    )
    assert len(parts.events()) == 1 + 2
    parts.check("p")


def test_rows_that_move_between_partitions(parts: Lab) -> None:
    parts.run("insert into p select g, g % 3 + 1, 'x' from generate_series(1, 9) g")
    parts.run(
        "update p set r = r % 3 + 1", "update p3 set id = id + 10", "update p set id = id + 1, a = 'moved'"
    )
    parts.check("p")


def test_a_move_that_a_trigger_refuses_is_a_delete(parts: Lab) -> None:
    parts.run("insert into p select g, 1, 'x' from generate_series(1, 5) g")
    parts.run(
        """create function refuse() returns trigger language plpgsql as $$
          begin if new.id = 2 then return null; end if; return new; end $$""",
        "create trigger refuse before insert on p2 for each row execute function refuse()",
        "update p set r = 2, a = 'moved'",
    )
    assert parts.value("select count(*) from p") == 4
    parts.check("p")


def test_truncating_a_partition_deletes_its_rows(parts: Lab) -> None:
    parts.run("insert into p values (1, 1, 'x'), (2, 2, 'x'), (3, 3, 'x'), (30, 3, 'x')")
    parts.run("truncate p1", "truncate p3")
    assert parts.brief()[4:] == ["delete [1, 1]", "delete [3, 3]", "delete [30, 3]"]
    with parts.conn.transaction():
        parts.run(
            "truncate p",
            "insert into p values (1, 1, 'y')",
            "truncate p1",
            "insert into p values (2, 1, 'z')",
        )
    assert parts.brief() == ["truncate None", "insert [1, 1]", "delete [1, 1]", "insert [2, 1]"]
    parts.check("p")


def test_new_partitions_are_found_and_detached_ones_left(parts: Lab) -> None:
    parts.run("create table p4 partition of p for values in (4)", "insert into p4 values (1, 4, 'missed')")
    assert parts.value("select postbus._maintain_captures()") == 4
    assert parts.value("select postbus._maintain_captures()") == 0
    parts.run("update p4 set a = 'x'", "insert into p values (2, 4, 'y')")
    assert parts.brief() == ["update [1, 4]", "insert [2, 4]"]
    parts.run("alter table p detach partition p1")
    assert parts.value("select postbus._maintain_captures()") == 4
    parts.run("insert into p1 values (1, 1, 'not ours')", "drop table p4")
    assert parts.value("select postbus._maintain_captures()") == 0
    assert parts.brief() == []
    parts.run("select postbus.uncapture('p')")
    assert parts.value("select count(*) from pg_trigger where tgname ~ '^!postbus'") == 0


def test_a_busy_table_is_left_for_the_next_time(parts: Lab) -> None:
    parts.run("create table p4 partition of p for values in (4)")
    with parts.db.connect(autocommit=False) as conn:
        conn.execute("insert into p4 values (1, 4, 'x')")
        assert parts.value("select postbus._maintain_captures()") == 0
    assert parts.value("select postbus._maintain_captures()") == 4


def test_inheritance(lab: Lab) -> None:
    lab.run(
        "create table base (id int primary key, a text)",
        "create table child (extra int, primary key (id)) inherits (base)",
        "select postbus.capture('base', 'cdc')",
        "insert into base values (1, 'x')",
        "insert into child values (2, 'y', 7)",
        "update base set a = 'z'",
        "update only base set a = 'o'",
        "update child set extra = 8, a = 'c'",
    )
    events = lab.events()
    assert [f"{e['op']} {e['event_key']} {e['table']}" for e in events] == [
        "insert 1 base",
        "insert 2 base",
        "update 1 base",
        "update 2 base",
        "update 1 base",
        "update 2 base",
    ]
    assert events[-1]["after"] == {"id": 2, "a": "c"}
    lab.check("base")
    lab.run("truncate only base", "insert into base values (3, 'x')", "truncate child")
    assert lab.brief() == ["delete 1", "insert 3", "delete 2"]
    lab.run("create table late (primary key (id)) inherits (base)", "select postbus._maintain_captures()")
    lab.run("insert into late values (4, 'l')", "delete from base where id = 3", "truncate base")
    assert lab.brief() == ["insert 4", "delete 3", "delete 4"]
    lab.check("base")
