"""Fixtures for every test: one temporary server per process, one fresh database per test.

``POSTBUS_TEST_DSN`` names a running server (a superuser's DSN) to use instead of the embedded one. With
``POSTBUS_TEST_POOLED=1`` what is tested connects through PgBouncer in transaction mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from postbus.testing import _databases
from postbus.testing._databases import fast_directory, run_sql
from tests.pgbouncer.pooler import NoPooler, Pooler, pooler

__all__ = ["SERVER_SETTINGS", "Database", "fast_directory", "run_sql"]

POOLED = os.environ.get("POSTBUS_TEST_POOLED") == "1"
ROOMY = {"default_pool_size": 20, "server_login_retry": 1, "server_idle_timeout": 2}
SERVER_SETTINGS = {**_databases.SETTINGS, "max_prepared_transactions": 10}


@dataclass
class Database:
    """A database of the test's own. Connections made with `connect` are closed with the test.

    Attributes:
        dsn: for what is tested.
        name: of the database.
        direct: for the test itself, where that is another way.
    """

    dsn: str
    name: str
    direct: str | None = None
    _connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    def connect(self, *, autocommit: bool = True, **options: Any) -> psycopg.Connection[Any]:
        """Connect; options go to `psycopg.connect` (``user="someone"``, ``row_factory=...``)."""
        conn = psycopg.connect(self.direct or self.dsn, autocommit=autocommit, **options)
        self._connections.append(conn)
        return conn

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()


@pytest.fixture(scope="session")
def server_dsn() -> Iterator[str]:
    """The DSN of a superuser on the server of this test process."""
    with _databases.server(SERVER_SETTINGS) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def template(server_dsn: str) -> Iterator[str]:
    """The name of a database that has the engine installed, to copy databases from."""
    with _databases.template(server_dsn) as name:
        yield name


def _fresh(server_dsn: str, template: str) -> Iterator[Database]:
    with _databases.fresh(server_dsn, template) as name:
        database = Database(make_conninfo(server_dsn, dbname=name), name)
        try:
            yield database
        finally:
            database.close()


@pytest.fixture
def db(server_dsn: str, template: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database with the engine installed."""
    for database in _fresh(server_dsn, template):
        yield _pooled(database, request)


@pytest.fixture
def emptydb(server_dsn: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database without the engine."""
    for database in _fresh(server_dsn, "template0"):
        yield _pooled(database, request)


def _pooled(database: Database, request: pytest.FixtureRequest) -> Database:
    """The same through PgBouncer, where the run or the test asks for it."""
    if POOLED and request.node.get_closest_marker("direct") is None:
        pgbouncer: Pooler = request.getfixturevalue("pgbouncer")
        database.dsn, database.direct = pgbouncer.dsn(database.name), database.dsn
    return database


@pytest.fixture(scope="session")
def pgbouncer(server_dsn: str) -> Iterator[Pooler]:
    """PgBouncer in transaction mode before the server of this test process."""
    try:
        # Tests of the pooler itself have more clients than sessions; others may hold several for long.
        with pooler(server_dsn, **(ROOMY if POOLED else {})) as running:
            yield running
    except NoPooler as e:
        pytest.skip(str(e))


@pytest.fixture
def pooled(db: Database, pgbouncer: Pooler) -> Iterator[Database]:
    """The database of the test, with the engine installed, through PgBouncer."""
    database = Database(pgbouncer.dsn(db.name), db.name)
    yield database
    database.close()


@pytest.fixture(scope="session")
def pg_major(server_dsn: str) -> int:
    """The major version of the server under test, for tests that need a newer one."""
    with psycopg.connect(server_dsn) as conn:
        return conn.info.server_version // 10000


def pytest_report_header() -> str:
    """Say which PostgreSQL is tested."""
    given = os.environ.get("POSTBUS_TEST_DSN")
    if given:
        return "postgresql: POSTBUS_TEST_DSN"
    from postbus.embedded import find_binaries

    found = find_binaries()
    return f"postgresql: {found.version} ({found.provider})"
