"""Fixtures for every test: one temporary server per process, one fresh database per test.

``POSTBUS_TEST_DSN`` names a running server (a superuser's DSN) to use instead of the embedded one.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from postbus.embedded import Server

SERVER_SETTINGS = {
    "max_connections": 100,
    "max_prepared_transactions": 10,
    "max_wal_size": "256MB",
    "shared_buffers": "64MB",
}

_numbers = itertools.count(1)


def fast_directory() -> str | None:
    """A directory in memory, where that is roomy: a database has 300 files, and disks are slow to make them.

    None stands for the usual place of temporary files.
    """
    memory = "/dev/shm"
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return None
    return memory if shutil.disk_usage(memory).free > 4 * 2**30 else None


@dataclass
class Database:
    """A database of the test's own. Connections made with `connect` are closed with the test."""

    dsn: str
    name: str
    _connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    def connect(self, *, autocommit: bool = True, **options: Any) -> psycopg.Connection[Any]:
        """Connect; options go to `psycopg.connect` (``user="someone"``, ``row_factory=...``)."""
        conn = psycopg.connect(self.dsn, autocommit=autocommit, **options)
        self._connections.append(conn)
        return conn

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()


def run_sql(dsn: str, statement: LiteralString, *names: str) -> None:
    """Run one statement outside a transaction, with identifiers in place of its ``{}``."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@pytest.fixture(scope="session")
def server_dsn() -> Iterator[str]:
    """The DSN of a superuser on the server of this test process."""
    given = os.environ.get("POSTBUS_TEST_DSN")
    if given:
        yield given
        return
    with Server.temporary(settings=SERVER_SETTINGS, inside=fast_directory()) as server:
        yield server.dsn


@pytest.fixture(scope="session")
def template(server_dsn: str) -> Iterator[str]:
    """The name of a database that has the engine installed, to copy databases from."""
    from postbus.engine import install

    name = f"postbus_template_{os.getpid()}"
    run_sql(server_dsn, "create database {}", name)
    try:
        with psycopg.connect(make_conninfo(server_dsn, dbname=name), autocommit=True) as conn:
            install(conn)
        yield name
    finally:
        run_sql(server_dsn, "drop database {} with (force)", name)


def _fresh(server_dsn: str, template: str) -> Iterator[Database]:
    name = f"postbus_test_{os.getpid()}_{next(_numbers)}"
    run_sql(server_dsn, "create database {} template {}", name, template)
    database = Database(make_conninfo(server_dsn, dbname=name), name)
    try:
        yield database
    finally:
        database.close()
        run_sql(server_dsn, "drop database {} with (force)", name)


@pytest.fixture
def db(server_dsn: str, template: str) -> Iterator[Database]:
    """A fresh database with the engine installed."""
    yield from _fresh(server_dsn, template)


@pytest.fixture
def emptydb(server_dsn: str) -> Iterator[Database]:
    """A fresh database without the engine."""
    yield from _fresh(server_dsn, "template0")


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
