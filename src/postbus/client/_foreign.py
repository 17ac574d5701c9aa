"""One statement on a connection that belongs to the caller, inside the caller's own transaction.

The connection is used as it is found: nothing is committed, rolled back or set. Statements are written with
``%s`` placeholders, each with a cast, and rows come back as plain tuples whose values have the same types
whatever the driver and however the caller has set it up:

- psycopg, and Django over psycopg: a cursor of our own on the caller's connection, with our own adapters;
- SQLAlchemy: its own call for SQL of the driver, so that it begins its transaction and wraps errors as usual;
- asyncpg: numbered placeholders.

In the last two, JSON crosses as text in both directions, since callers often set codecs of their own for it.

Frameworks are recognised by the names of their classes: none is imported unless the caller did so first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn, cast

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row
from psycopg.types.array import ListBinaryDumper
from psycopg.types.json import set_json_loads

from postbus.errors import BadArgument, PostbusError, from_sqlstate

Row = tuple[Any, ...]
Params = tuple[object, ...]

SYNC_KINDS = (
    "a psycopg Connection or Cursor, a SQLAlchemy Session or Connection, or a Django connection or cursor"
)
ASYNC_KINDS = (
    "a psycopg AsyncConnection or AsyncCursor, an asyncpg Connection, "
    "or a SQLAlchemy AsyncSession or AsyncConnection"
)

_JSON_OIDS = (114, 3802)  # json, jsonb
_PLACEHOLDER = re.compile(r"%s(?:::jsonb(\[\])?)?")

_adapters = AdaptersMap(psycopg.adapters)
set_json_loads(json.loads, _adapters)  # the caller may have set another for all connections
_adapters.register_dumper(list, ListBinaryDumper)  # 30 times as fast as the one for text


class _Cursor(psycopg.Cursor[Row]):
    """A cursor that does not look at the adapters and the row factory of its connection."""

    @property
    def adapters(self) -> AdaptersMap:
        return _adapters


class _AsyncCursor(psycopg.AsyncCursor[Row]):
    @property
    def adapters(self) -> AdaptersMap:
        return _adapters


def fetch(conn: object, query: str, params: Params) -> list[Row]:
    """Run a statement on the caller's connection and return its rows.

    Example:
        >>> with psycopg.connect() as conn:  # doctest: +SKIP
        ...     fetch(conn, "select postbus.send(%s::text, %s::text)", ("emails", "hello"))
        [(1,)]
    """
    run = _first(conn, _SYNC)
    if run is None:
        _refuse(conn, SYNC_KINDS, ASYNC_KINDS, "AsyncBus", other=_ASYNC)
    with _translated():
        return cast("list[Row]", run(conn, query, params))


async def fetch_async(conn: object, query: str, params: Params) -> list[Row]:
    """Run a statement on the caller's asynchronous connection and return its rows."""
    run = _first(conn, _ASYNC)
    if run is None:
        _refuse(conn, ASYNC_KINDS, SYNC_KINDS, "Bus", other=_SYNC)
    with _translated():
        return cast("list[Row]", await run(conn, query, params))


def _names(conn: object) -> Iterator[tuple[str, str]]:
    """The top package and the name of each class the object has."""
    for cls in type(conn).__mro__:
        yield cls.__module__.partition(".")[0], cls.__name__


def _first(conn: object, kinds: dict[tuple[str, str], Callable[..., Any]]) -> Callable[..., Any] | None:
    return next((kinds[name] for name in _names(conn) if name in kinds), None)


def _refuse(
    conn: object, wanted: str, others: str, instead: str, *, other: dict[tuple[str, str], Callable[..., Any]]
) -> NoReturn:
    given = f"{type(conn).__module__}.{type(conn).__qualname__}"
    hint = None
    if _first(conn, other) is not None:
        hint = f"{instead} takes {others}."
    raise BadArgument(f"conn is {given}; it has to be {wanted}", hint=hint)


# psycopg


def _psycopg(conn: psycopg.Connection[Any], query: str, params: Params) -> list[Row]:
    # Binary results do not depend on DateStyle and its kin.
    with _Cursor(conn, row_factory=tuple_row) as cur:
        return cur.execute(query.encode(), params, binary=True).fetchall()


async def _psycopg_async(conn: psycopg.AsyncConnection[Any], query: str, params: Params) -> list[Row]:
    async with _AsyncCursor(conn, row_factory=tuple_row) as cur:
        await cur.execute(query.encode(), params, binary=True)
        return await cur.fetchall()


def _psycopg_cursor(cur: psycopg.Cursor[Any], query: str, params: Params) -> list[Row]:
    return _psycopg(cur.connection, query, params)


async def _psycopg_cursor_async(cur: psycopg.AsyncCursor[Any], query: str, params: Params) -> list[Row]:
    return await _psycopg_async(cur.connection, query, params)


def _psycopg2(conn: Any, query: str, params: Params) -> list[Row]:
    from psycopg2 import extensions, extras

    with conn.cursor(cursor_factory=extensions.cursor) as cur:
        extras.register_default_jsonb(cur, loads=json.loads)
        cur.execute(query, params or None)
        return [_without_views(row) for row in cur.fetchall()]


def _without_views(row: Row) -> Row:
    """psycopg2 returns binary data as views."""
    return tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)


# Django


def _django(conn: Any, query: str, params: Params) -> list[Row]:
    if conn.vendor != "postgresql":
        raise BadArgument(f"conn is a Django connection to {conn.display_name}; it has to be to PostgreSQL")
    conn.validate_thread_sharing()
    conn.ensure_connection()
    conn.validate_no_broken_transaction()
    driver = conn.connection
    run = _psycopg if isinstance(driver, psycopg.Connection) else _psycopg2
    with conn.wrap_database_errors:
        return run(driver, query, params)


def _django_cursor(cur: Any, query: str, params: Params) -> list[Row]:
    return _django(cur.db, query, params)


# SQLAlchemy


def _session(session: Any, query: str, params: Params) -> list[Row]:
    return _sqlalchemy(session.connection(), query, params)


async def _session_async(session: Any, query: str, params: Params) -> list[Row]:
    return await _sqlalchemy_async(await session.connection(), query, params)


async def _sqlalchemy_async(conn: Any, query: str, params: Params) -> list[Row]:
    return cast("list[Row]", await conn.run_sync(_sqlalchemy, query, params))


def _sqlalchemy(conn: Any, query: str, params: Params) -> list[Row]:
    dialect = conn.dialect
    if dialect.name != "postgresql" or dialect.driver not in _SQLALCHEMY_DRIVERS:
        raise BadArgument(
            f"conn is a SQLAlchemy connection through {dialect.name}+{dialect.driver}; "
            f"the drivers that can be used are {', '.join(_SQLALCHEMY_DRIVERS)}"
        )
    numbered = dialect.driver == "asyncpg"
    shape = _shapes.get(query)
    if shape is None:
        look = conn.exec_driver_sql(_for_shape(_in_text(query, numbered)), params or None)
        shape = _shapes[query] = tuple(column[1] in _JSON_OIDS for column in look.cursor.description)
        look.close()
    result = conn.exec_driver_sql(_as_text(_in_text(query, numbered), shape), params or None)
    return [_decoded(_without_views(row), shape) for row in result]


_SQLALCHEMY_DRIVERS = ("psycopg", "psycopg_async", "psycopg2", "asyncpg")


# asyncpg


async def _asyncpg(conn: Any, query: str, params: Params) -> list[Row]:
    shape = _shapes.get(query)
    if shape is None:
        # Without a name it leaves nothing behind, also where PgBouncer changes the session underneath.
        look = await conn.prepare(_in_text(query, True), name="")
        shape = _shapes[query] = tuple(column.type.oid in _JSON_OIDS for column in look.get_attributes())
    records = await conn.fetch(_as_text(_in_text(query, True), shape), *params)
    return [_decoded(tuple(record), shape) for record in records]


# JSON as text. The shape of a statement says which of its columns are JSON; it is asked for once.

_shapes: dict[str, tuple[bool, ...]] = {}


@lru_cache(maxsize=256)
def _in_text(query: str, numbered: bool) -> str:
    """The statement with JSON parameters given as text, and ``$1``, ``$2`` for ``%s`` where so wanted."""
    n = 0

    def placeholder(match: re.Match[str]) -> str:
        nonlocal n
        n += 1
        array = match[1] or ""
        cast_to = f"::text{array}::jsonb{array}" if "jsonb" in match[0] else ""
        return (f"${n}" if numbered else "%s") + cast_to

    return _PLACEHOLDER.sub(placeholder, query)


def _for_shape(query: str) -> str:
    # A limit of 0 ends before the first row is asked for: nothing in the statement is called.
    return f"select * from ({query}) as q limit 0"  # noqa: S608 - our own statement


@lru_cache(maxsize=256)
def _as_text(query: str, shape: tuple[bool, ...]) -> str:
    """The statement with its JSON columns as text."""
    if not any(shape):
        return query
    names = [f"c{i}" for i in range(len(shape))]
    columns = (name + "::text" * is_json for name, is_json in zip(names, shape, strict=True))
    return f"select {', '.join(columns)} from ({query}) as q ({', '.join(names)})"  # noqa: S608


def _decoded(row: Row, shape: tuple[bool, ...]) -> Row:
    if not any(shape):
        return row
    return tuple(
        json.loads(value) if is_json and value is not None else value
        for value, is_json in zip(row, shape, strict=True)
    )


# Errors


@contextmanager
def _translated() -> Iterator[None]:
    """Raise the errors of the engine as their Postbus classes, whoever wrapped them."""
    try:
        yield
    except PostbusError:
        raise
    except Exception as exc:
        error = _from_driver(exc)
        if error is None:
            raise
        raise error from exc


def _from_driver(exc: BaseException) -> PostbusError | None:
    """Look for an error of the engine in an error and in those it was made from."""
    cause: BaseException | None = exc
    while cause is not None:
        diag = getattr(cause, "diag", None)
        if diag is not None:  # psycopg and psycopg2
            state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
            return from_sqlstate(
                state, diag.message_primary or str(cause), diag.message_detail, diag.message_hint
            )
        if any(name == ("asyncpg", "PostgresError") for name in _names(cause)):
            details = cast("Any", cause)
            return from_sqlstate(details.sqlstate, details.message, details.detail, details.hint)
        cause = cause.__cause__
    return None


_SYNC: dict[tuple[str, str], Callable[..., Any]] = {
    ("psycopg", "Connection"): _psycopg,
    ("psycopg", "Cursor"): _psycopg_cursor,
    ("psycopg2", "connection"): _psycopg2,
    ("sqlalchemy", "Session"): _session,
    ("sqlalchemy", "scoped_session"): _session,
    ("sqlalchemy", "Connection"): _sqlalchemy,
    ("django", "BaseDatabaseWrapper"): _django,
    ("django", "ConnectionProxy"): _django,
    ("django", "CursorWrapper"): _django_cursor,
}
_ASYNC: dict[tuple[str, str], Callable[..., Any]] = {
    ("psycopg", "AsyncConnection"): _psycopg_async,
    ("psycopg", "AsyncCursor"): _psycopg_cursor_async,
    ("asyncpg", "Connection"): _asyncpg,
    ("asyncpg", "PoolConnectionProxy"): _asyncpg,
    ("sqlalchemy", "AsyncSession"): _session_async,
    ("sqlalchemy", "async_scoped_session"): _session_async,
    ("sqlalchemy", "AsyncConnection"): _sqlalchemy_async,
}
