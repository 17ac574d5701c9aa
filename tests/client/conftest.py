"""A bus for each test, blocking and asynchronous in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, cast

import psycopg
import pytest

from postbus import AsyncBus, Bus
from tests.client.driven import Driven, driven
from tests.conftest import Database

Open = Callable[..., AbstractContextManager[Bus]]
Transaction = Callable[[Bus], AbstractContextManager[Any]]


@contextmanager
def opened(kind: str, dsn: str, **options: Any) -> Iterator[Bus]:
    """A `Bus`, or an `AsyncBus` that is used like one."""
    if kind == "Bus":
        with Bus(dsn, **options) as bus:
            yield bus
    else:
        with driven(lambda: AsyncBus(dsn, **options)) as bus:
            yield cast("Bus", bus)


@pytest.fixture(params=["Bus", "AsyncBus"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two."""
    return str(request.param)


@pytest.fixture
def bus(kind: str, db: Database) -> Iterator[Bus]:
    """An open bus."""
    with opened(kind, db.dsn, name="one") as made:
        yield made


@pytest.fixture
def another(kind: str, db: Database) -> Iterator[Callable[..., Bus]]:
    """Opens further buses of the same kind, for other consumers."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(opened(kind, db.dsn, **options))


@contextmanager
def transaction(bus: Bus, dsn: str) -> Iterator[Any]:
    """A connection of the user's own in a transaction, which commits unless there is an exception."""
    if isinstance(bus, Driven):
        with Driven(bus._loop, bus._loop.run(psycopg.AsyncConnection.connect, dsn)) as conn:
            yield conn
    else:
        with psycopg.connect(dsn) as conn:
            yield conn


def count(db: Database, query: str, *params: Any) -> int:
    """The one number that a query returns."""
    with psycopg.connect(db.dsn, autocommit=True) as conn:
        row = conn.execute(query.encode(), params).fetchone()
    assert row is not None
    return int(row[0])


def in_flight(db: Database, name: str) -> int:
    """How many messages are on leases."""
    return count(db, "select coalesce(sum(messages), 0) from postbus.in_flight(%s)", name)


def eventually(look: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something that happens in the background."""
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def moved_clock(db: Database, seconds: float) -> psycopg.Connection[Any]:
    """A connection for which the engine's clock is ahead: leases have ended there."""
    conn = db.connect()
    conn.execute(
        "select set_config('postbus.fake_now', (now() + make_interval(secs => %s))::text, false)", (seconds,)
    )
    return conn


def fail() -> NoReturn:
    """What goes wrong in a body."""
    raise ZeroDivisionError("division by zero")


@contextmanager
def raises(kind: type[BaseException], match: str | None = None) -> Iterator[None]:
    """`pytest.raises` for bodies whose several statements are the point."""
    with pytest.raises(kind, match=match):
        yield
