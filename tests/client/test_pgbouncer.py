"""Through PgBouncer in transaction mode: all of it works, by polling."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from postbus import Bus, LeaseLost
from postbus.client import _listener
from tests.client.conftest import eventually, fail, opened, raises, transaction
from tests.conftest import Database


@pytest.fixture
def bus(kind: str, pooled: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    monkeypatch.setattr(_listener, "_SELF_TEST_SECONDS", 0.5)
    with opened(kind, pooled.dsn, pool_size=5) as made:
        yield made


def test_it_is_recognised(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, and no prepared statements: the next server session does not know them."""
    queue = bus.queue("emails", create=True)
    with caplog.at_level(logging.INFO, "postbus"):
        for n in range(3):
            queue.send(n)
            assert [m.payload for m in queue.receive(wait=2)] == [n]
        assert list(queue.messages(wait=0.1)) == []
        eventually(lambda: bus.listener.works is False)
        assert list(queue.messages(wait=0.1)) == []
        bus.stream("orders", create=True)
        assert len(bus.stream("orders").group("billing").consume(wait=0.2)) == 0
    assert len([m for m in caplog.messages if "LISTEN does not work" in m]) == 1
    with bus.pool.connection() as conn:
        assert conn.prepare_threshold is None
        prepared = bus.fetch("select count(*) from pg_prepared_statements", ())
    assert prepared == [(0,)]


@pytest.mark.direct("that is what it is about")
def test_a_direct_connection_is_recognised_too(kind: str, db: Database) -> None:
    with opened(kind, db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        assert list(queue.messages(wait=0.1)) == []
        eventually(lambda: bus.listener.works is True)
        with bus.pool.connection() as conn:
            assert conn.prepare_threshold == 0


def test_queue(bus: Bus) -> None:
    queue = bus.queue("emails", create=True, backoff=0)
    queue.send_batch(list(range(200)), headers={"h": 1})
    assert [m.payload for m in queue.messages(wait=0, max=20)] == list(range(200))
    queue.send(1, key="k", priority=3)
    with raises(ZeroDivisionError), queue.messages() as messages:
        for _ in messages:
            fail()
    [m] = queue.receive(wait=5).messages
    assert m.attempt == 2
    m.ack()
    with pytest.raises(LeaseLost):
        m.ack()


def test_stream(bus: Bus) -> None:
    stream = bus.stream("orders", create=True, lanes=2)
    group = stream.group("billing", ordering="key")
    stream.publish_batch(list(range(200)), key=[str(n % 7) for n in range(200)])
    assert sorted(m.payload for m in group.messages(wait=0, max=20)) == list(range(200))


def test_transactions(bus: Bus, pooled: Database) -> None:
    queue = bus.queue("emails", create=True)
    with transaction(bus, pooled.dsn) as conn:
        queue.send(1, conn=conn)
        assert queue.peek() == []
    with transaction(bus, pooled.dsn) as conn:
        assert [m.payload for m in queue.receive(conn=conn)] == [1]
    assert queue.peek() == []


def test_several_consumers_share_two_sessions(bus: Bus) -> None:
    queue = bus.queue("emails", create=True, lease=1)
    queue.send_batch(list(range(300)))
    seen: list[Any] = []

    def consume() -> None:
        seen.extend(m.payload for m in queue.messages(wait=0.5, max=10))

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(300))


def test_server_sessions_are_cut(bus: Bus, db: Database) -> None:
    queue = bus.queue("emails", create=True, lease=1)
    queue.send_batch(list(range(100)))
    seen = set()
    for n, m in enumerate(queue.messages(wait=2, max=10)):
        seen.add(m.payload)
        if n in (20, 60):
            with psycopg.connect(db.dsn, autocommit=True) as conn:
                conn.execute(
                    """select pg_terminate_backend(pid) from pg_stat_activity
                    where datname = current_database() and pid <> pg_backend_pid()"""
                )
    assert seen == set(range(100))
