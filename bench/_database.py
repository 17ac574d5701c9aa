"""The server that is measured: one of its own, or one that runs already, with both systems installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from postbus import engine
from postbus.embedded import Server

Connection = psycopg.Connection[Any]

# A temporary server leaves fsync off unless told otherwise; here commits cost what they cost in earnest.
# Checkpoints are kept out of the measured turns, for both systems alike.
_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum_naptime": "10s",
}
_SHOWN = ("shared_buffers", "fsync", "full_page_writes", "max_wal_size")


@dataclass(frozen=True)
class Database:
    """A database with the engine and pgmq in it."""

    dsn: str
    settings: dict[str, str]

    def connect(self, *, synchronous_commit: str = "off") -> Connection:
        """Connect in autocommit mode: each call is a transaction of its own."""
        return psycopg.connect(
            self.dsn, autocommit=True, options=f"-c synchronous_commit={synchronous_commit}"
        )


@contextmanager
def database(dsn: str | None) -> Iterator[Database]:
    """Make a database for one run, on the given server or on a temporary one, and remove it afterwards."""
    if dsn is None:
        with Server.temporary(settings=_SETTINGS) as server, _inside(server.dsn) as made:
            yield made
    else:
        with _inside(dsn) as made:
            yield made


@contextmanager
def _inside(server_dsn: str) -> Iterator[Database]:
    name = f"postbus_bench_{os.getpid()}"
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            dsn = make_conninfo(server_dsn, dbname=name)
            with psycopg.connect(dsn) as conn:
                engine.install(conn)
                conn.execute(resources.files("pgmq").joinpath("sql", "pgmq.sql").read_bytes())
                settings = _settings(conn)
            yield Database(dsn, settings)
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _settings(conn: Connection) -> dict[str, str]:
    pgmq = resources.files("pgmq").joinpath("sql", "VERSION").read_text(encoding="utf-8").split()[-1]
    shown = {"PostgreSQL": _show(conn, "server_version").split()[0], "pgmq": pgmq.lstrip("v")}
    shown |= {name: _show(conn, name) for name in _SHOWN}
    return {**shown, "CPUs": str(os.cpu_count())}


def _show(conn: Connection, name: str) -> str:
    row = conn.execute("select current_setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])
