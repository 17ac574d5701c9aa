"""Callers with operators and functions of their own cannot get them run with the engine's rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.bus import Bus, Session, refused

EVIL = """
create schema evil;
create table evil.marker (who text, what text);
create function evil.mark(what text) returns boolean language plpgsql as $$
  begin
    insert into evil.marker values (current_user, what);
    return true;
  end $$;
create function evil.same(a text, b text) returns boolean language sql as
  $$ select evil.mark('text = text') $$;
create function evil.same(a xid, b xid) returns boolean language sql as
  $$ select evil.mark('xid = xid') $$;
create function evil.same(a int, b int) returns boolean language sql as
  $$ select evil.mark('int = int') $$;
create function evil.same(a bigint, b bigint) returns boolean language sql as
  $$ select evil.mark('bigint') $$;
create function evil.less(a float8, b float8) returns boolean language sql as
  $$ select evil.mark('<') $$;
create function evil.both(a bigint, b int) returns bigint language sql as
  $$ select evil.mark('&')::int::bigint $$;
create operator evil.= (leftarg = text, rightarg = text, procedure = evil.same);
create operator evil.= (leftarg = xid, rightarg = xid, procedure = evil.same);
create operator evil.= (leftarg = int, rightarg = int, procedure = evil.same);
create operator evil.= (leftarg = bigint, rightarg = bigint, procedure = evil.same);
create operator evil.< (leftarg = float8, rightarg = float8, procedure = evil.less);
create operator evil.& (leftarg = bigint, rightarg = int, procedure = evil.both);
create function evil.nextval(regclass) returns bigint language sql as
  $$ select evil.mark('nextval')::int::bigint $$;
create function evil.now_() returns timestamptz language sql as
  $$ select case when evil.mark('now_') then 'epoch'::timestamptz end $$;
create function evil.clock_timestamp() returns timestamptz language sql as
  $$ select case when evil.mark('clock') then 'epoch'::timestamptz end $$;
create function evil.pg_current_xact_id() returns xid8 language sql as
  $$ select evil.mark('xid')::int::text::xid8 $$;
create function evil.pg_sequence_last_value(regclass) returns bigint language sql as
  $$ select evil.mark('last_value')::int::bigint $$;
create function evil.date_part(text, timestamptz) returns float8 language sql as
  $$ select evil.mark('date_part')::int::float8 $$;
create function evil.hashtextextended(text, bigint) returns bigint language sql as
  $$ select evil.mark('hash')::int::bigint $$;
create function evil.pg_notify(text, text) returns void language sql as
  $$ select evil.mark('notify') $$;
create function evil.random() returns float8 language sql as
  $$ select evil.mark('random')::int::float8 $$;
create function evil.current_setting(text, boolean) returns text language sql as
  $$ select evil.mark('set')::text $$;
grant all on all tables in schema evil to public;
grant usage on schema evil to public;
"""


@pytest.fixture
def attacker(bus: Bus, s: Session) -> Iterator[Session]:
    """A role that may publish and consume, and sees its own operators and functions first."""
    role = f"attacker_{bus.db.name}"
    s.rows(EVIL)
    s.rows(f"create role {role} login in role postbus_writer")
    try:
        a = bus.session(user=role)
        a.rows("set search_path = evil, pg_catalog, postbus")
        yield a
        a.conn.close()
        bus._sessions.remove(a)
    finally:
        s.rows(f"drop owned by {role}; drop role {role}")


def test_search_path_of_the_caller_does_not_matter(bus: Bus, s: Session, attacker: Session) -> None:
    s.stream(lanes=3)
    s.group()
    s.group("total", ordering="stream")
    for young in [True, False]:
        attacker.publish("a", "k")
        attacker.rows("select postbus.publish('s', '{}'::jsonb), postbus.publish('s', '\\x00'::bytea)")
        attacker.publish("b", "k", dedupe_key=f"d{young}", deliver_at=bus.now.replace(second=1))
        attacker.rows("select postbus.publish_batch('s', array['c', 'd'], null, array['k', null])")
        for group in ["g", "total"]:
            while page := attacker.consume(2, by=group):
                attacker.rows("select postbus.extend(%s::text)", page[0].batch)
                attacker.rows("select postbus.nack(%s::text, '0 seconds')", page[0].receipt)
                if page := attacker.consume(by=group):
                    attacker.rows("select postbus.ack(%s::text)", page[0].receipt)
                    if page[1:]:
                        attacker.rows("select postbus.ack(array[%s::text])", page[0].batch)
        attacker.rows("select postbus.tick('s')")
        s.maintain(5)
    assert attacker.value("select 'a'::text = 'b'::text"), "its operators do come first"
    assert s.rows("select distinct what from evil.marker") == [("text = text",)]
    owner = s.value("select current_user")
    assert s.rows("select what from evil.marker where who = %s", owner) == []


def test_writers_do_not_manage(s: Session, attacker: Session) -> None:
    s.stream()
    s.group()
    calls = [
        *(f"select * from postbus.{t}" for t in ["log", "log_1", "stream", "lease"]),
        *(f"delete from postbus.{t}" for t in ["log", "log_1", "stream", "lease"]),
        *(f"select postbus.{f}" for f in ["seek('s', 'g', 'latest')", "create_stream('t')", "maintain()"]),
        "select postbus._dedupe(1, '1 hour', 'k')",
        "select postbus._tick(1, 'postbus.id_1', 1)",
    ]
    for call in calls:
        with refused("42501"):
            attacker.rows(call)
