"""Who may do what with queues: writers send, receive and finish; readers look; PUBLIC nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.conftest import Database
from tests.queue.work import Desk, Office, told

# By name; overloads have the same rights.
LOOK = {
    "version", "now_", "list_streams", "list_groups", "list_captures", "list_schedules", "in_flight",
    "dead_letters",
    "list_queues", "list_key_policies", "list_bindings", "peek", "archived", "next_due", "default_lease",
    "queue_stats", "stream_stats", "group_stats", "stuck_groups", "health", "metrics", "throughput",
    "latency_percentiles", "error_rate",
    "position", "hold_position", "release_positions", "plan_window", "read_window",
    "read_columns", "bound_window",
    "count_window", "list_runs", "pipeline_stats",
}  # fmt: skip
WORK = {
    "publish", "publish_batch", "consume", "tick", "ack", "nack", "release", "extend", "dead_letter",
    "send",
    "send_batch",
    "send_topic", "receive", "pop", "cancel", "follow_group",
    "stage", "commit_staged", "discard_staged", "begin_run", "report_run", "end_run",
}  # fmt: skip
MANAGE = [
    "create_queue('x')", "alter_queue('q', '{}')", "drop_queue('q')", "purge_queue('q')", "pause('q')",
    "resume('q')",
    "set_key_policy('q', concurrency => 1)", "unset_key_policy('q')", "bind('q')", "unbind('q')",
    "redrive('q')",
    "purge_dead_letters('q')", "drop_pipeline('p')", "maintain()", "uninstall()",
]  # fmt: skip


@pytest.fixture
def office(db: Database) -> Office:
    s = Office(db).session()
    s.queue(on_ack="archive")
    s.queue("keyed", max_size=100)
    s.policy(of="keyed", concurrency=1)
    s.queue("unlogged", unlogged_unsafe=True)
    for name in ["q", "keyed", "unlogged"]:
        s.rows("select postbus.bind(%s)", name)
    assert isinstance(s.bus, Office)
    return s.bus


@contextmanager
def member(office: Office, of: str | None) -> Iterator[Desk]:
    admin = office.session()
    role = f"member_of_{office.db.name}"
    admin.rows(f"create role {role} login" + (f" in role {of}" if of else ""))
    try:
        yield office.session(user=role)
    finally:
        office.db.close()
        with psycopg.connect(office.db.dsn, autocommit=True) as conn:
            conn.execute(f"drop role {role}".encode())


def denied(s: Desk, call: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        s.rows(f"select postbus.{call}")


OURS = "pronamespace = (select oid from pg_namespace where nspname = 'postbus')"


def rights(s: Desk) -> set[str]:
    """The public functions that the session may call."""
    return {
        r[0]
        for r in s.rows(
            f"select proname from pg_proc where {OURS}"
            " and proname !~ '^_' and has_function_privilege(oid, 'execute')"
        )
    }


def tables(s: Desk) -> list[tuple[str, ...]]:
    """Tables and sequences of the engine that the session may read or write."""
    return s.rows(
        "select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'postbus' and ("
        " c.relkind in ('r', 'p') and has_table_privilege(c.oid, 'select, insert, update, delete, truncate')"
        " or c.relkind = 'S' and has_sequence_privilege(c.oid, 'usage, select, update'))"
    )


def test_writer(office: Office) -> None:
    with member(office, "postbus_writer") as w:
        for name in ["q", "keyed", "unlogged"]:
            w.send("plain", to=name)
            w.send("keyed", "k", to=name, priority=2, delay="1 second", ttl="1 day", dedupe_key="d")
            w.rows("select postbus.send(%s, '{}'::jsonb), postbus.send(%s, '\\x00'::bytea)", name, name)
            ids = w.send_many(3, to=name)
            assert w.value("select postbus.cancel(%s, %s)", name, ids[0]) is True
            page = w.receive(of=name)
            assert len(page) == 5
            w.extend(page[0].receipt, state=1)
            w.release(page[0].receipt)
            page[:1] = w.receive(1, of=name)
            w.give_back(page[0].receipt)
            w.give_up(page[1].receipt)
            w.ack(page[2].receipt)
            w.ack(page[3].receipt, page[4].receipt)
            assert len(w.pop(of=name)) == 1
            w.peek(of=name)
            for look in ["next_due", "default_lease", "archived", "dead_letters", "in_flight"]:
                w.rows(f"select * from postbus.{look}(%s)", name)
        assert len(w.rows("select * from postbus.send_topic('t', 'x')")) == 3
        for call in MANAGE:
            denied(w, call)
        assert rights(w) == LOOK | WORK
        assert tables(w) == []
    assert office.session().drain() != []


def test_reader(office: Office) -> None:
    s = office.session()
    s.send_many(3)
    (m,) = s.receive(1)
    with member(office, "postbus_reader") as r:
        assert len(r.peek()) == 3
        assert r.sizes() == (2, 0, 1)
        assert r.rows("select batch from postbus.in_flight('q')") == [(m.receipt,)]
        for look in ["next_due", "archived", "dead_letters", "list_key_policies"]:
            r.rows(f"select * from postbus.{look}('q')")
        assert len(r.rows("select * from postbus.list_bindings()")) == 3
        for call in [
            *MANAGE, "send('q', 'x')", "send('q', '{}'::jsonb)", "send_batch('q', array['x'])",
            "send_topic('t', 'x')",
            "receive('q')", "pop('q')", "cancel('q', 1)", f"ack('{m.receipt}')", f"nack('{m.receipt}')",
            f"extend('{m.receipt}')", f"dead_letter('{m.receipt}')",
        ]:  # fmt: skip
            denied(r, call)
        assert rights(r) == LOOK
        assert tables(r) == []
    assert office.session().ack(m.receipt) == 1


def test_admin(office: Office) -> None:
    with member(office, "postbus_admin") as a:
        for call in MANAGE[1:2] + MANAGE[3:11]:
            a.rows(f"select postbus.{call}")
        a.queue("mine", on_ack="archive")
        a.send("x", to="mine")
        assert told(a.receive(of="mine")) == ["x"]
        a.rows("select postbus.drop_queue('mine', true)")
        a.maintain()
        assert tables(a) == []


def test_public(office: Office) -> None:
    with member(office, None) as p:
        for call in [*MANAGE, "send('q', 'x')", "receive('q')", "list_queues()", "version()"]:
            denied(p, call)
        assert rights(p) == set()
        assert tables(p) == []


def test_public_has_no_function_at_all(office: Office) -> None:
    with member(office, None) as p:
        assert p.rows(
            f"select proname from pg_proc where {OURS}"
            " and has_function_privilege(oid, 'execute')"
        ) == []  # fmt: skip


def test_no_internal_function_is_open_but_those_that_wrappers_need(office: Office) -> None:
    """They check what they are given as the public ones do."""
    with member(office, "postbus_writer") as w:
        inner = w.rows(
            f"select distinct proname from pg_proc where {OURS}"
            " and proname ~ '^_' and has_function_privilege(oid, 'execute') order by 1"
        )
        assert {r[0] for r in inner} <= {
            "_publish", "_publish_other", "_publish_batch", "_give_back",
            "_send", "_send_other", "_send_topic",
        }  # fmt: skip
        send_other = "_send_other('q', array['x'], null, array['t'], null, null, {}, null, null, null, null)"
        with pytest.raises(psycopg.Error, match="needs a priority"):
            w.rows(f"select postbus.{send_other.format(40)}")
        with pytest.raises(psycopg.Error, match="is not a receipt"):
            w.rows("select postbus._give_back(array['x'], null, null, null, true)")
