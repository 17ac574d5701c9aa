"""Opening, closing, and where a bus connects to."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import PoolTimeout

from postbus import AlreadyExists, AsyncBus, BadArgument, Bus, NotFound, PostbusError, WrongVersion
from tests.client.conftest import eventually, opened
from tests.conftest import Database


def test_dsn_of_the_environment(kind: str, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_DSN", db.dsn)
    with opened(kind, None) as bus:  # type: ignore[arg-type]
        bus.queue("emails", create=True)
    assert db.connect().execute("select name from postbus.list_queues()").fetchall() == [("emails",)]


def test_dsn_as_url_is_taken_too(db: Database) -> None:
    parts = {k: str(v) for k, v in conninfo_to_dict(db.dsn).items()}
    host = parts["host"].replace("/", "%2F")
    url = f"postgresql://{parts['user']}@{host}:{parts['port']}/{parts['dbname']}"
    with Bus(url) as bus:
        assert bus.queue("emails", create=True).send(1) == 1


@pytest.mark.slow
def test_embedded_by_default(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("POSTBUS_DSN", raising=False)
    monkeypatch.setenv("POSTBUS_HOME", str(tmp_path / "home"))
    tmp_path.chmod(0o755)
    with opened(kind, None) as bus:  # type: ignore[arg-type]
        queue = bus.queue("emails", create=True)
        queue.send("hello")
        assert [m.payload for m in queue.receive()] == ["hello"]
    with opened(kind, None) as bus:  # type: ignore[arg-type]
        assert bus.queue("emails").peek() == []


def test_unreadable_dsn() -> None:
    with pytest.raises(BadArgument, match=r"nonsense(.|\n)*postgresql://"):
        Bus("nonsense").open()


def test_nobody_there(kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        dsn = f"host=127.0.0.1 port={port} dbname=shop"
        with pytest.raises(psycopg.OperationalError, match=str(port)), opened(kind, dsn):
            pass


@pytest.mark.direct("PgBouncer lets everybody in, and complains later")
def test_no_such_database(kind: str, db: Database) -> None:
    dsn = make_conninfo(db.dsn, dbname="no_such_shop")
    with pytest.raises(psycopg.OperationalError, match="no_such_shop"), opened(kind, dsn):
        pass


def test_no_engine(kind: str, emptydb: Database) -> None:
    with pytest.raises(NotFound, match=r"no postbus engine(.|\n)*postbus install"), opened(kind, emptydb.dsn):
        pass


def test_install(kind: str, emptydb: Database) -> None:
    with opened(kind, emptydb.dsn, install=True) as bus:
        bus.queue("emails", create=True).send(1)
    with opened(kind, emptydb.dsn, install=True) as bus:
        assert len(bus.queue("emails").peek()) == 1


def test_engine_of_another_version(kind: str, db: Database) -> None:
    db.connect().execute("update postbus.meta set version = '99.0.0'")
    with pytest.raises(WrongVersion, match=r"99\.0\.0"), opened(kind, db.dsn):
        pass


def test_nothing_connects_before_open(db: Database) -> None:
    bus = Bus("host=nowhere.invalid")
    with pytest.raises(BadArgument, match=r"not open(.|\n)*with block"):
        bus.queue("emails", create=True)


def test_queue_without_create_asks_nothing(bus: Bus) -> None:
    queue = bus.queue("emails")
    with pytest.raises(NotFound, match="emails"):
        queue.send(1)
    with pytest.raises(NotFound, match="emails"):
        queue.receive()
    with pytest.raises(NotFound, match="emails"):
        next(iter(queue))


def test_use_after_close(kind: str, db: Database) -> None:
    with opened(kind, db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        bus.close()
        bus.close()
        with pytest.raises(BadArgument, match="not open"):
            queue.send(1)
        with pytest.raises(BadArgument, match="not open"):
            next(iter(queue))


def test_open_again(kind: str, db: Database) -> None:
    with opened(kind, db.dsn) as bus:
        bus.open()
        queue = bus.queue("emails", create=True)
        bus.close()
        bus.open()
        queue.send(1)
        assert [m.payload for m in queue.messages(wait=0)] == [1]


def test_opening_twice_at_once(db: Database) -> None:
    async def main() -> int:
        bus = AsyncBus(db.dsn)
        await asyncio.gather(*(bus.open() for _ in range(5)))
        pool = bus.pool
        await asyncio.gather(*(bus.open() for _ in range(5)))
        assert bus.pool is pool
        await bus.close()
        return 0

    asyncio.run(main())
    eventually(lambda: connections(db) == 0)


def connections(db: Database) -> int:
    with psycopg.connect(db.dsn) as conn:
        query = """select count(*) from pg_stat_activity where datname = current_database()
            and pid <> pg_backend_pid() and query not like '%%pg_stat_activity%%'"""
        row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_opening_does_not_block_the_loop() -> None:
    async def main() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        with socket.socket() as mute:  # accepts, and never says a word
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            task = asyncio.create_task(other())
            bus = AsyncBus(f"host=127.0.0.1 port={mute.getsockname()[1]} connect_timeout=2")
            with pytest.raises(psycopg.OperationalError):
                await bus.open()
            task.cancel()
        return turns

    assert asyncio.run(main()) > 20


def test_create_again_is_fine(bus: Bus) -> None:
    for _ in range(2):
        bus.queue("emails", create=True, max_attempts=3)
        orders = bus.stream("orders", create=True, lanes=2)
        orders.group("billing", ordering="key")
    assert bus.fetch("select max_attempts from postbus.list_queues()", ()) == [(3,)]
    assert bus.fetch("select lanes from postbus.list_streams()", ()) == [(2,)]


def test_create_of_the_other_kind_is_not(bus: Bus) -> None:
    bus.queue("emails", create=True)
    bus.stream("orders", create=True)
    with pytest.raises(AlreadyExists, match="stream 'orders'"):
        bus.queue("orders", create=True)
    with pytest.raises(AlreadyExists, match="queue 'emails'"):
        bus.stream("emails", create=True)


def test_options_need_create(bus: Bus) -> None:
    with pytest.raises(BadArgument, match=r"emails.*max_attempts"):
        bus.queue("emails", max_attempts=3)
    with pytest.raises(BadArgument, match=r"orders.*lanes"):
        bus.stream("orders", lanes=3)
    with pytest.raises(BadArgument, match=r"billing.*ordering"):
        bus.stream("orders").group("billing", create=False, ordering="key")


def test_misspelt_option(bus: Bus) -> None:
    with pytest.raises(BadArgument, match="max_attempt"):
        bus.queue("emails", create=True, max_attempt=3)


def test_bad_arguments() -> None:
    with pytest.raises(BadArgument, match="pool_size"):
        Bus(pool_size=0)


@pytest.mark.direct("this PgBouncer is one role for all")
def test_create_by_a_role_that_may_only_work(kind: str, db: Database) -> None:
    """Code that says create=True also runs where somebody else has made the queues."""
    admin = db.connect()
    role = f"worker_{os.getpid()}"
    admin.execute("select postbus.create_queue('emails')")
    admin.execute("select postbus.create_stream('orders')")
    admin.execute("select postbus.create_group('orders', 'billing')")
    admin.execute(f"create role {role} login in role postbus_writer".encode())
    try:
        with opened(kind, make_conninfo(db.dsn, user=role)) as bus:
            queue = bus.queue("emails", create=True)
            queue.send(1)
            assert [m.payload for m in queue.messages(wait=0)] == [1]
            group = bus.stream("orders", create=True).group("billing")
            assert len(group.consume()) == 0
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                bus.queue("others", create=True)
    finally:
        admin.execute(f"drop owned by {role}; drop role {role}".encode())


def test_name_of_the_consumer(kind: str, db: Database) -> None:
    with opened(kind, db.dsn, name="worker 7") as bus:
        queue = bus.queue("emails", create=True)
        queue.send(1)
        queue.receive()
        assert bus.fetch("select worker from postbus.in_flight('emails')", ()) == [("worker 7",)]


def test_pool_is_bounded_and_says_so(kind: str, db: Database) -> None:
    with opened(kind, db.dsn, pool_size=1, timeout=0.2) as bus:
        with bus.pool.connection() as conn:
            assert conn is not None
            with pytest.raises(PoolTimeout):
                bus.maintain()
        bus.maintain()


def test_connections_are_given_back(kind: str, db: Database) -> None:
    with opened(kind, db.dsn, pool_size=2) as bus:
        queue = bus.queue("emails", create=True)
        for _ in range(10):
            with pytest.raises(PostbusError):
                queue.send(1, priority=77)
        queue.send(1)


def test_repr(bus: Bus) -> None:
    queue = bus.queue("emails", create=True)
    group = bus.stream("orders", create=True).group("billing")
    assert "Queue 'emails'" in repr(queue)
    assert "Group 'billing' of 'orders'" in repr(group)
    assert "Stream 'orders'" in repr(group.stream)
    queue.send({"secret": 1})
    assert repr(queue.receive()[0]).endswith("Delivery 1 of 'emails', attempt 1>")
