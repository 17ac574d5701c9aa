"""One worker per database does the upkeep."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from postbus import Bus, Message, Worker
from postbus.worker import _maintainer
from tests.conftest import Database, run_sql
from tests.worker.conftest import Start
from tests.worker.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_maintainer, "EVERY", 0.05)
    monkeypatch.setattr(_maintainer, "CANDIDATE_EVERY", 0.1)


def idle(dsn: str, name: str, **options: Any) -> Worker:
    worker = Worker(dsn, name=name, **options)

    @worker.queue("q", create=True)
    async def handle(m: Message[Any]) -> None: ...

    return worker


def holder(db: Database) -> int | None:
    """The server process that has the lock."""
    query = (
        "select pid from pg_locks where locktype = 'advisory' and objid = %s and granted and database = "
        "(select oid from pg_database where datname = current_database())"
    )
    row = db.connect().execute(query, (_maintainer.LOCK,)).fetchone()
    return None if row is None else int(row[0])


@pytest.mark.direct("behind a pooler workers take turns")
def test_one_is_elected_and_does_it(db: Database, bus: Bus, start: Start) -> None:
    bus.stream("s", create=True)
    workers = [idle(db.dsn, str(n)) for n in range(3)]
    for worker in workers:
        start(worker)
    eventually(lambda: any(w.is_maintainer for w in workers), "elected")
    assert sum(w.is_maintainer for w in workers) == 1
    bus.stream("s").publish("x")
    counted = "select events from postbus.list_streams()"
    eventually(lambda: bus.fetch(counted, ()) == [(1,)], "counted by upkeep")
    assert sum(w.is_maintainer for w in workers) == 1


def test_another_takes_over(db: Database, start: Start) -> None:
    first, second = (idle(db.dsn, str(n)) for n in range(2))
    running = start(first)
    eventually(lambda: first.is_maintainer, "elected")
    start(second)
    running.stop()
    eventually(lambda: second.is_maintainer, "took over", within=5)


@pytest.mark.direct("it kills the session that has the lock")
def test_connection_that_dies(db: Database, start: Start) -> None:
    worker = idle(db.dsn, "one")
    start(worker)
    pid = eventually(lambda: holder(db), "elected")
    db.connect().execute("select pg_terminate_backend(%s)", (pid,))
    eventually(lambda: holder(db) not in (None, pid), "elected again", within=10)


def test_none_that_do_not_want_to(db: Database, start: Start) -> None:
    worker = idle(db.dsn, "one", maintain=False)
    start(worker)
    assert not worker.is_maintainer
    assert holder(db) is None


@pytest.mark.direct("this PgBouncer is one role for all")
def test_role_that_may_not(
    db: Database, bus: Bus, server_dsn: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    bus.queue("q", create=True)
    role = f"writer_of_{db.name}"
    run_sql(server_dsn, "create role {} login in role postbus_writer", role)
    worker = Worker(make_conninfo(db.dsn, user=role))
    handled: list[Any] = []

    @worker.queue("q")
    async def handle(m: Message[Any]) -> None:
        handled.append(m.payload)

    try:
        with caplog.at_level(logging.WARNING, "postbus"):
            running = start(worker)
            bus.queue("q").send("x")
            eventually(lambda: handled == ["x"], "it works all the same")
            allowed = (
                db.connect()
                .execute("select has_function_privilege(%s, 'postbus.maintain(boolean)', 'execute')", (role,))
                .fetchone()
            )
            if allowed == (False,):
                eventually(lambda: "may not do the upkeep" in caplog.text, "and says so, once")
            running.stop()
        assert caplog.text.count("may not do the upkeep") <= 1
    finally:
        run_sql(server_dsn, "drop role {}", role)


def test_problems_are_told(db: Database, bus: Bus, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    bus.stream("bad", create=True).publish("x")
    db.connect().execute("drop sequence postbus.id_1 cascade")
    with caplog.at_level(logging.WARNING, "postbus"):
        start(idle(db.dsn, "one"))
        eventually(lambda: "upkeep of bad" in caplog.text, "told")


def test_through_a_pooler(pooled: Database, db: Database, bus: Bus, start: Start) -> None:
    bus.stream("s", create=True)
    worker, other = idle(pooled.dsn, "one"), idle(pooled.dsn, "two")
    start(worker)
    start(other)
    eventually(lambda: worker.is_maintainer or other.is_maintainer, "elected for one run after the other")
    bus.stream("s").publish("x")
    eventually(lambda: bus.fetch("select events from postbus.list_streams()", ()) == [(1,)], "counted")
    with psycopg.connect(db.dsn) as conn:
        cleans = conn.execute(
            "select count(*) from pg_locks where locktype = 'advisory' and objid = %s", (_maintainer.LOCK,)
        ).fetchone()
    assert cleans in ((0,), (1,)), "no lock stays with the pooler"
