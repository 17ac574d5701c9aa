"""The clock moves the engine's time for every session, and goes on from there."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from postbus import AsyncBus, BadArgument, Bus, LeaseLost
from postbus.testing import Clock

NOW = "select postbus.now_(), postbus._tx_now()"


def ahead(conn: psycopg.Connection[tuple[datetime, datetime]], query: str = NOW) -> timedelta:
    """How far both of the engine's times are ahead of the real one, to the minute."""
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    found = {round((at - datetime.now(UTC)) / timedelta(minutes=1)) for at in row}
    assert len(found) == 1
    return timedelta(minutes=found.pop())


def test_sessions_that_were_there_before(postbus_dsn: str, clock: Clock) -> None:
    with psycopg.connect(postbus_dsn, autocommit=True) as conn:
        conn.prepare_threshold = 0
        assert ahead(conn) == timedelta()  # planned, with the real clock in it
        clock.move(hours=1)
        assert ahead(conn) == timedelta(hours=1)
        clock.move(days=1, minutes=5)
        assert ahead(conn) == timedelta(days=1, hours=1, minutes=5)
        clock.reset()
        assert ahead(conn) == timedelta()


def test_a_transaction_that_is_open_sees_it_at_its_end_at_the_latest(postbus_dsn: str, clock: Clock) -> None:
    with psycopg.connect(postbus_dsn) as conn:
        assert ahead(conn) == timedelta()
        clock.move(hours=1)
        assert ahead(conn) in (timedelta(), timedelta(hours=1))
        conn.commit()
        assert ahead(conn) == timedelta(hours=1)


def test_new_sessions(postbus_dsn: str, clock: Clock) -> None:
    clock.move(weeks=-1)
    with psycopg.connect(postbus_dsn) as conn:
        assert ahead(conn) == timedelta(weeks=-1)


def test_set_and_going_on(clock: Clock) -> None:
    to = datetime(2030, 1, 1, 9, tzinfo=UTC)
    clock.set(to)
    first = clock.now()
    time.sleep(0.01)
    assert to <= first < clock.now() < to + timedelta(minutes=1)


def test_a_time_without_a_zone(clock: Clock) -> None:
    with pytest.raises(BadArgument, match="has no time zone"):
        clock.set(datetime(2030, 1, 1))


def test_the_setting_of_a_session_still_counts(postbus_dsn: str, clock: Clock) -> None:
    with psycopg.connect(postbus_dsn, autocommit=True) as conn:
        conn.execute("set postbus.fake_now = '2020-01-01 00:00+00'")
        clock.move(hours=1)
        assert conn.execute(NOW).fetchone() == (datetime(2020, 1, 1, tzinfo=UTC),) * 2


def test_the_time_of_the_server_is_not_moved(postbus_dsn: str, clock: Clock) -> None:
    clock.move(hours=1)
    with psycopg.connect(postbus_dsn) as conn:
        assert ahead(conn, "select now(), clock_timestamp()") == timedelta()


def test_delayed_messages_come_due(bus: Bus, clock: Clock) -> None:
    queue = bus.queue("emails", create=True)
    queue.send("later", delay=3600)
    assert not queue.receive()
    clock.move(minutes=59)
    assert not queue.receive()
    clock.move(minutes=1)
    assert [m.payload for m in queue.receive()] == ["later"]


def test_leases_end(bus: Bus, clock: Clock) -> None:
    queue = bus.queue("emails", create=True)
    queue.send("x")
    [first] = queue.receive(lease=30).messages
    clock.move(seconds=31)
    [second] = queue.receive(lease=30).messages
    assert second.attempt == 2
    with pytest.raises(LeaseLost):
        first.ack()
    second.ack()


def test_what_is_sent_carries_the_moved_time(bus: Bus, clock: Clock) -> None:
    clock.set(datetime(2030, 1, 1, 9, tzinfo=UTC))
    queue, stream = bus.queue("emails", create=True), bus.stream("orders", create=True)
    queue.send("x")
    stream.publish("x")
    [m] = queue.receive()
    [event] = stream.group("all", start="earliest").consume()
    for at in (m.created_at, event.created_at):
        assert at is not None
        assert at.date() == datetime(2030, 1, 1).date()


def test_schedules_fire(bus: Bus, clock: Clock) -> None:
    queue = bus.queue("reports", create=True)
    clock.set(datetime(2030, 1, 1, 8, 59, tzinfo=UTC))
    bus.fetch("select postbus.schedule('daily', '0 9 * * *', 'reports', '{}'::text, 'UTC')", ())
    bus.maintain()
    assert not queue.receive()
    clock.move(minutes=2)
    bus.maintain()
    assert len(queue.receive()) == 1


@pytest.mark.anyio
async def test_with_asyncio(async_bus: AsyncBus, clock: Clock) -> None:
    queue = await async_bus.queue("emails", create=True)
    await queue.send("later", delay=3600)
    clock.move(hours=1)
    assert [m.payload for m in await queue.pop()] == ["later"]
