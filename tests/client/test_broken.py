"""Connections that break, and a server that goes away for a while."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import psycopg
import pytest

from postbus import Bus
from postbus.client import _pace
from postbus.client._connect import is_quiet
from tests.client.conftest import eventually, in_flight, opened
from tests.conftest import Database, run_sql


def kill_all(db: Database) -> int:
    """Terminate every other backend of the database."""
    with psycopg.connect(db.dsn, autocommit=True) as conn:
        rows = conn.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid()"""
        ).fetchall()
    return len(rows)


def others(db: Database) -> int:
    with psycopg.connect(db.dsn, autocommit=True) as conn:
        return len(
            conn.execute(
                """select from pg_stat_activity where datname = current_database()
                and pid <> pg_backend_pid()"""
            ).fetchall()
        )


def test_closed_connections_are_not_handed_out(kind: str, db: Database) -> None:
    """Also when all of a large pool have been closed: nobody waits, nobody gets an error."""
    with opened(kind, db.dsn, pool_size=8) as bus:
        queue = bus.queue("emails", create=True)
        for _ in range(3):
            threads = [
                threading.Thread(target=bus.fetch, args=("select pg_sleep(0.2)", ())) for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert kill_all(db) >= 5
            eventually(lambda: others(db) == 0)
            began = time.monotonic()
            for n in range(20):
                queue.send(n)
            assert time.monotonic() - began < 5
    rows = db.connect().execute("select count(*) from postbus.peek('emails', max => 100)").fetchone()
    assert rows == (60,)


@pytest.mark.direct("it looks at the socket to the server")
def test_quiet_connections(db: Database) -> None:
    conn = psycopg.connect(db.dsn, autocommit=True)
    assert is_quiet(conn)
    conn.execute("listen news")
    db.connect().execute("notify news")
    eventually(lambda: not is_quiet(conn))
    conn.execute("")
    assert is_quiet(conn)
    pid = conn.info.backend_pid
    db.connect().execute("select pg_terminate_backend(%s)", (pid,))
    eventually(lambda: not alive(db, pid))
    assert not is_quiet(conn)
    conn.close()


def alive(db: Database, pid: int) -> bool:
    return bool(db.connect().execute("select from pg_stat_activity where pid = %s", (pid,)).fetchall())


@pytest.mark.parametrize("source", ["queue", "stream"])
def test_every_connection_is_cut_again_and_again(
    kind: str, db: Database, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost; what came twice was on a lease when a connection was cut."""
    total = 3000
    caplog.set_level(logging.CRITICAL, "psycopg.pool")
    with opened(kind, db.dsn) as bus, opened(kind, db.dsn) as producer:
        if source == "queue":
            mine: Any = bus.queue("emails", create=True, lease=2)
            send: Any = producer.queue("emails").send_batch
        else:
            mine = bus.stream("emails", create=True).group("all", ordering="stream", lease=2, backoff=0)
            send = producer.stream("emails").publish_batch
        sent = 0
        stop = threading.Event()
        cuts = 0

        def cut() -> None:
            nonlocal cuts
            while not stop.wait(0.25):
                kill_all(db)
                cuts += 1

        def produce() -> None:
            nonlocal sent
            while sent < total:
                try:
                    send(list(range(sent, sent + 100)))
                except psycopg.Error:
                    if not seen_in_database(db, source, sent):
                        continue
                sent += 100

        threads = [threading.Thread(target=cut), threading.Thread(target=produce)]
        for thread in threads:
            thread.start()
        seen: set[int] = set()
        for handled, m in enumerate(mine.messages(max=50, lease=2)):
            seen.add(m.payload)
            if handled % 100 == 0:
                time.sleep(0.02)
            if len(seen) == total:
                break
        stop.set()
        for thread in threads:
            thread.join()
        assert seen == set(range(total))
        assert cuts >= 2


def seen_in_database(db: Database, source: str, first: int) -> bool:
    """Whether a batch was stored although the connection broke."""
    while True:
        try:
            with psycopg.connect(db.dsn, autocommit=True) as conn:
                table = "queued" if source == "queue" else "log"
                query = f"select from postbus.{table} where payload = '{first}'"
                return bool(conn.execute(query.encode()).fetchall())
        except psycopg.OperationalError:
            continue


@pytest.mark.direct("PgBouncer keeps callers waiting while the server is away")
def test_server_away_for_a_while(kind: str, db: Database, server_dsn: str) -> None:
    """A consumer waits for it and goes on soon after it is back; a sender is told."""
    with opened(kind, db.dsn) as bus, opened(kind, db.dsn, timeout=1) as hasty:
        queue = bus.queue("emails", create=True)
        queue.send_batch(list(range(10)))
        seen: list[int] = []
        half = threading.Event()
        go_on = threading.Event()

        def consume() -> None:
            for m in queue.messages(wait=0, max=2, prefetch=2):
                seen.append(m.payload)
                if m.payload == 3:
                    half.set()
                    go_on.wait(30)

        thread = threading.Thread(target=consume)
        thread.start()
        assert half.wait(20)
        run_sql(server_dsn, "alter database {} allow_connections false", db.name)
        kill_everything(server_dsn, db.name)
        go_on.set()
        with pytest.raises(psycopg.OperationalError):
            hasty.queue("emails").send(1)
        time.sleep(3.5)  # longer than the pool itself tries
        assert thread.is_alive()
        back = time.monotonic()
        run_sql(server_dsn, "alter database {} allow_connections true", db.name)
        thread.join(30)
        assert not thread.is_alive()
        assert time.monotonic() - back < 10
        assert sorted(set(seen)) == list(range(10))
        hasty.queue("emails").send(99)


def kill_everything(server_dsn: str, name: str) -> None:
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))


@pytest.mark.direct("PgBouncer keeps callers waiting while the server is away")
def test_close_while_the_server_is_away(
    kind: str, db: Database, server_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up after a while rather than hang, and nothing is lost: the messages come again."""
    monkeypatch.setattr(_pace, "CLOSE", 1.5)
    try:
        with opened(kind, db.dsn) as bus:
            queue = bus.queue("emails", create=True, lease=1)
            queue.send_batch([1, 2, 3])
            messages = [queue.messages(max=1, prefetch=1) for _ in range(3)]
            assert sorted(next(iter(each)).payload for each in messages) == [1, 2, 3]
            run_sql(server_dsn, "alter database {} allow_connections false", db.name)
            kill_everything(server_dsn, db.name)
            began = time.monotonic()
            bus.close()
            assert time.monotonic() - began < 15
    finally:
        run_sql(server_dsn, "alter database {} allow_connections true", db.name)
    eventually(lambda: in_flight(db, "emails") == 0)
    rows = db.connect().execute("select count(*) from postbus.peek('emails')").fetchone()
    assert rows == (3,)


def test_too_many_connections(db: Database, server_dsn: str) -> None:
    """A consumer that cannot get a connection waits for one."""
    run_sql(server_dsn, "create role crowded login in role postbus_writer connection limit 1")
    try:
        from psycopg.conninfo import make_conninfo

        db.connect().execute("select postbus.create_queue('emails')")
        db.connect().execute("select postbus.send_batch('emails', array['1', '2'])")
        with Bus(make_conninfo(db.dsn, user="crowded"), pool_size=5) as bus:
            # The pool has the only one: the listener gets none, and consumers poll.
            assert [m.payload for m in bus.queue("emails").messages(wait=0)] == [1, 2]
            db.connect().execute("select postbus.send('emails', '3')")
            assert [m.payload for m in bus.queue("emails").receive(wait=10)] == [3]
    finally:
        run_sql(server_dsn, "drop role crowded")


def test_a_single_call_is_not_repeated(bus: Bus, db: Database) -> None:
    """Not behind the caller's back: he is told."""
    queue = bus.queue("emails", create=True)
    failures: list[BaseException] = []

    def receive() -> None:
        try:
            queue.receive(wait=5)
        except psycopg.OperationalError as exc:
            failures.append(exc)

    blocker = psycopg.connect(db.dsn)
    blocker.execute("lock table postbus.queue in access exclusive mode")
    thread = threading.Thread(target=receive)
    thread.start()
    query = """select pid from pg_stat_activity
        where wait_event_type = 'Lock' and datname = current_database()"""
    eventually(lambda: db.connect().execute(query).fetchall())
    [(pid,)] = db.connect().execute(query).fetchall()
    db.connect().execute("select pg_terminate_backend(%s)", (pid,))
    thread.join()
    blocker.close()
    assert len(failures) == 1
