"""Which database a command works on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from rich.text import Text

from postbus import engine
from postbus.cli._print import notes
from postbus.engine import Connection
from postbus.errors import translated

_CONNECT_SECONDS = 10


def _inherit(ctx: typer.Context, value: str | None) -> str | None:
    """The DSN may be given at any level: ``postbus --dsn X streams create Y`` too."""
    if ctx.resilient_parsing:
        return value
    above: Any = ctx.parent
    while value is None and above is not None:
        value = above.params.get("dsn")
        above = above.parent
    return value


Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        help="The database, as a URL or as key=value pairs; else $POSTBUS_DSN, else the embedded PostgreSQL.",
        show_default=False,
        callback=_inherit,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON: timestamps in ISO 8601, intervals in seconds."),
]


def chosen(dsn: str | None) -> str | None:
    """The DSN of the option or of the environment; None stands for the embedded server."""
    return dsn or os.environ.get("POSTBUS_DSN") or None


@contextmanager
def connect(dsn: str | None, *, check: bool = True) -> Iterator[Connection]:
    """Connect in autocommit mode, to an engine that fits this package unless told otherwise."""
    with (
        translated(),
        _target(dsn) as target,
        _open(with_defaults(target)) as conn,
    ):
        if check:
            engine.check(conn)
        yield conn


def with_defaults(dsn: str) -> str:
    """Add a bound on the time to connect and a name to be known by, where the DSN has none."""
    given = conninfo_to_dict(dsn)
    defaults: dict[str, Any] = {"fallback_application_name": "postbus"}
    if "connect_timeout" not in given and "PGCONNECT_TIMEOUT" not in os.environ:
        defaults["connect_timeout"] = _CONNECT_SECONDS
    return make_conninfo(dsn, **defaults)


def _open(dsn: str) -> closing[Connection]:
    # Nothing to commit or roll back at the end, which after a signal may not be possible either.
    return closing(psycopg.connect(dsn, autocommit=True))


@contextmanager
def another(conn: Connection) -> Iterator[Connection]:
    """A fresh connection in place of one that a signal found in the middle of something.

    The old one may be out of step, and the cancellation on its way to it would hit what it does next.
    """
    same = make_conninfo(**conn.info.get_parameters(), password=conn.info.password or None)
    conn.close()
    with _open(with_defaults(same)) as fresh:
        yield fresh


@contextmanager
def _target(dsn: str | None) -> Iterator[str]:
    target = chosen(dsn)
    if target is not None:
        yield target
        return
    from postbus.embedded import Server

    with Server() as server:
        text = f"postbus: no DSN given, using the embedded PostgreSQL {server.version} in {server.data_dir}"
        notes().print(Text(text, style="dim"), soft_wrap=True)
        yield server.dsn


def rows(conn: Connection, query: str, *args: Any) -> list[dict[str, Any]]:
    """Run a query and return its rows by column name."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, args).fetchall()


def value(conn: Connection, query: str, *args: Any) -> Any:
    """Run a query and return the one value of its one row."""
    row = conn.execute(query, args).fetchone()
    return None if row is None else row[0]
