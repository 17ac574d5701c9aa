"""Fixtures of the queue engine's tests.

They share one database per process, and its connections, and drop what they made: fresh ones would cost most
tests more than they take. Those that look at all of the database ask for `db`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.conftest import Database, _fresh
from tests.queue.work import KINDS, Desk, Office


@pytest.fixture(scope="session")
def queue_database(server_dsn: str, template: str) -> Iterator[Database]:
    with contextmanager(_fresh)(server_dsn, template) as database:
        yield database


@pytest.fixture(scope="session")
def spare_connections() -> list[psycopg.Connection[Any]]:
    return []


@pytest.fixture
def bus(queue_database: Database, spare_connections: list[psycopg.Connection[Any]]) -> Iterator[Office]:
    office = Office(queue_database, spare=spare_connections)
    yield office
    office.clean()


@pytest.fixture
def s(bus: Office) -> Desk:
    """The session that most tests need."""
    return bus.session()


@pytest.fixture
def one(s: Desk) -> Desk:
    """... with a queue q as it is made without options."""
    s.queue()
    return s


@pytest.fixture(params=["logged", "unlogged"])
def either(request: pytest.FixtureRequest, s: Desk) -> Desk:
    """... with a queue q of either kind."""
    s.queue(unlogged_unsafe=request.param == "unlogged")
    return s


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, s: Desk) -> Desk:
    """... with a queue q of every kind."""
    s.queue_of_kind(request.param)
    return s
