"""Unlogged queues: the same engine on a table that a crash empties. Other tests take both kinds."""

from __future__ import annotations

import os
import signal
import time

import psycopg
import pytest

from postbus.embedded import Server
from postbus.engine import install
from tests.conftest import SERVER_SETTINGS, Database, fast_directory
from tests.queue.work import Desk, Office


def test_messages_are_where_the_name_says(s: Desk) -> None:
    s.queue("safe")
    s.queue("unsafe", unlogged_unsafe=True)
    for name in ["safe", "unsafe"]:
        s.send("x", to=name)
        s.send("x", to=name, priority=3, delay="1 hour", ttl="1 day")
        s.send_many(3, to=name)
    kinds = dict(
        s.rows("select relname, relpersistence from pg_class where relname in ('queued', 'queued_unlogged')")
    )
    assert {k: str(v) for k, v in kinds.items()} == {"queued": "p", "queued_unlogged": "u"}
    for table, name in [("queued", "safe"), ("queued_unlogged", "unsafe")]:
        joined = f"postbus.{table} m join postbus.queue q on q.id = m.queue_id"
        assert s.rows(f"select q.name, count(*) from {joined} group by 1") == [(name, 5)]


def test_every_generated_function_keeps_to_its_table(s: Desk) -> None:
    """No statement of an unlogged queue touches the logged table, and the other way round."""
    source = dict(
        s.rows(
            "select proname, prosrc from pg_proc"
            " where pronamespace = 'postbus'::regnamespace and proname ~ '_unlogged$'"
        )
    )
    assert len(source) > 10
    for name, text in source.items():
        assert "postbus.queued " not in text, name
        twin = s.value(
            "select prosrc from pg_proc where pronamespace = 'postbus'::regnamespace and proname = %s",
            name.removesuffix("_unlogged"),
        )
        assert "queued_unlogged" not in twin, name
    # What a generated function calls, where there are two, is the generated one.
    for name, text in source.items():
        for other in source:
            assert f"postbus.{other.removesuffix('_unlogged')}(" not in text, (
                f"{name} calls the twin of {other}"
            )


@pytest.mark.fault
def test_a_crash_empties_it_and_it_goes_on() -> None:
    with Server.temporary(settings=SERVER_SETTINGS, inside=fast_directory()) as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            install(conn)
        before = Office(Database(server.dsn, "postgres"))
        s = before.session()
        s.queue("safe")
        s.queue("unsafe", unlogged_unsafe=True)
        for name in ["safe", "unsafe"]:
            s.send_many(5, to=name)
        (lost,) = s.receive(1, of="unsafe")
        (kept,) = s.receive(1, of="safe")
        os.kill(s.conn.info.backend_pid, signal.SIGKILL)
        after = Office(Database(server.dsn, "postgres"))
        s = again(after)
        with pytest.raises(psycopg.Error, match="lease lost"):
            s.ack(lost.receipt)
        assert s.ack(kept.receipt) == 1
        assert s.drain(of="safe") == ["m2", "m3", "m4", "m5"]
        s.send("new", to="unsafe", priority=2)
        assert s.drain(of="unsafe") == ["new"]
        s.maintain()
        before.db.close()
        after.db.close()


def again(bus: Office) -> Desk:
    """A session, as soon as the server has recovered; until it takes note of the death, it still answers."""
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end, "messages that should be lost are there"
        try:
            s = bus.session()
            if s.value("select count(*) from postbus.queued_unlogged") == 0:
                return s
        except psycopg.OperationalError:
            pass
        time.sleep(0.05)
