"""A server for tests, and fresh databases on it, copied from a template that has the engine."""

from __future__ import annotations

import itertools
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import LiteralString
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

SETTINGS = {"max_connections": 100, "max_wal_size": "256MB", "shared_buffers": "64MB"}

# Test processes may share a server, also from several hosts: a process number would not tell them apart.
_mark = uuid.uuid4().hex[:8]
_numbers = itertools.count(1)


@contextmanager
def server(settings: Mapping[str, object] | None = None) -> Iterator[str]:
    """The DSN of a server to make databases on: ``$POSTBUS_TEST_DSN``, or an embedded one of our own."""
    given = os.environ.get("POSTBUS_TEST_DSN")
    if given:
        yield given
        return
    from postbus.embedded import Server

    with Server.temporary(settings={**SETTINGS, **(settings or {})}, inside=fast_directory()) as started:
        yield started.dsn


def fast_directory() -> str | None:
    """A directory in memory, where that is roomy: a database has 300 files, and disks are slow to make them.

    None stands for the usual place of temporary files.
    """
    memory = "/dev/shm"  # noqa: S108 - a directory of our own is made in it
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return None
    return memory if shutil.disk_usage(memory).free > 4 * 2**30 else None


@contextmanager
def template(server_dsn: str) -> Iterator[str]:
    """The name of a database that has the engine installed, to copy databases from."""
    from postbus.engine import install

    name = f"postbus_template_{_mark}_{next(_numbers)}"
    run_sql(server_dsn, "create database {}", name)
    try:
        with psycopg.connect(make_conninfo(server_dsn, dbname=name), autocommit=True) as conn:
            install(conn)
        yield name
    finally:
        drop(server_dsn, name)


@contextmanager
def fresh(server_dsn: str, template: str) -> Iterator[str]:
    """The name of a database of its own, dropped afterwards with whoever is still connected to it."""
    name = f"postbus_test_{_mark}_{next(_numbers)}"
    run_sql(server_dsn, "create database {} template {}", name, template)
    try:
        yield name
    finally:
        drop(server_dsn, name)


def drop(server_dsn: str, name: str) -> None:
    """Drop a database."""
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        # A session that was closed takes a millisecond to end. DROP DATABASE would wait a hundred for it.
        end = time.monotonic() + 0.05
        query = "select exists (select from pg_stat_activity where datname = %s)"
        while (row := conn.execute(query, (name,)).fetchone()) and row[0] and time.monotonic() < end:
            time.sleep(0.002)
        conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def url(server_dsn: str, dbname: str) -> str:
    """The DSN of a database as a URL: drivers, SQLAlchemy and tools of all kinds take it."""
    parts = {**conninfo_to_dict(server_dsn), "dbname": dbname}
    user, password = parts.pop("user", None), parts.pop("password", None)
    who = f"{quote(str(user), safe='')}" if user else ""
    if password:
        who += f":{quote(str(password), safe='')}"
    where, name = "", quote(str(parts.pop("dbname")), safe="")
    host = str(parts.get("host", ""))
    if host and "/" not in host and "," not in host:
        parts.pop("host")
        where = f"[{host}]" if ":" in host else host
        port = parts.pop("port", None)
        where += f":{port}" if port else ""
    rest = urlencode({k: str(v) for k, v in parts.items() if v is not None}, quote_via=quote)
    return f"postgresql://{who}{'@' if who else ''}{where}/{name}{'?' if rest else ''}{rest}"


def run_sql(dsn: str, statement: LiteralString, *names: str) -> None:
    """Run one statement outside a transaction, with identifiers in place of its ``{}``."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
