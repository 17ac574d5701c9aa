"""The table that is mirrored, as the database describes it: its capture, key, columns and their types."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from postbus.errors import AlreadyExists, BadArgument, NotFound
from postbus.pipelines._mirror_rows import RESCUED, Kind
from postbus.spark._server import Server

# Rows that open transactions hold are left for later; look again after so long.
HELD = 0.5
_KINDS = {
    "bool": "bool",
    "int2": "int",
    "int4": "int",
    "int8": "long",
    "oid": "long",
    "float4": "float",
    "float8": "double",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "date": "date",
    "bytea": "binary",
    "json": "json",
    "jsonb": "json",
}
RESERVED = {"_op", RESCUED}
MOST_DIGITS = 38  # of a decimal in Delta, Iceberg and Spark

_FIND = """
select t.oid, c."table", n.nspname, t.relname, c.stream, c.key, c.columns, c.exclude,
  extract(epoch from c.created_at)::text,
  format(',"schema":%%s,"table":%%s,"key":', to_json(n.nspname), to_json(t.relname))
from postbus.list_captures() c join pg_class t on t.oid = c."table"::regclass
join pg_namespace n on n.oid = t.relnamespace
where t.oid = %s order by c.stream
"""

# A domain is what it is made of. Virtual generated columns are not captured.
_COLUMNS = """
with recursive base as (
  select a.attname::text as name, a.attnum::int as no, a.atttypid as type, a.atttypmod as modifier,
    format_type(a.atttypid, a.atttypmod) as shown,
    a.atthasdef or a.atthasmissing or a.attidentity <> '' as filled
  from pg_attribute a
  where a.attrelid = %s and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
  union all
  select b.name, b.no, t.typbasetype, case when t.typtypmod >= 0 then t.typtypmod else b.modifier end,
    b.shown, b.filled
  from base b join pg_type t on t.oid = b.type where t.typtype = 'd'
)
select b.name, b.no, b.shown, b.filled, t.typname::text, b.modifier, t.typcategory = 'A' or t.typtype = 'c'
from base b join pg_type t on t.oid = b.type where t.typtype <> 'd' order by b.no
"""


@dataclass(frozen=True)
class Column:
    """A column as the catalog has it now."""

    name: str
    no: int
    type: str
    filled: bool  # rows that were there before it may have a value in it
    kind: Kind


@dataclass(frozen=True)
class Captured:
    """A table and one capture of it."""

    oid: int
    name: str  # with its schema, quoted where that is needed
    schema: str
    table: str
    stream: str
    keys: tuple[str, ...]
    only: tuple[str, ...] | None
    exclude: tuple[str, ...]
    since: str  # when it was captured
    head: str  # what the payload of its events begins with, after the operation


def find(server: Server, table: str, stream: str | None, capture: bool) -> Captured:
    """The capture of a table.

    Args:
        server: the database.
        table: the name of the table, as SQL takes it.
        stream: which capture, where there are several; with `capture` where the changes shall go.
        capture: capture the table if it is not captured yet.

    Raises:
        NotFound: there is no such table, or no capture of it.
        BadArgument: it has several, or no key.
    """
    oid = _oid(server, table)
    found = [
        Captured(
            o, name, schema, relation, of, tuple(keys or ()), only and tuple(only), tuple(out or ()), *rest
        )
        for o, name, schema, relation, of, keys, only, out, *rest in server.rows(_FIND, oid)
    ]
    chosen = [c for c in found if stream is None or c.stream == stream]
    if not chosen and capture:
        if stream is None:
            raise BadArgument(
                f"table {table} is not captured, and there is no stream to capture it to",
                hint="Name one: stream='changes' (--stream changes).",
            )
        with contextlib.suppress(AlreadyExists):  # somebody else was quicker
            server.rows("select postbus.capture(%s::oid::regclass, %s)", oid, stream)
        return find(server, table, stream, False)
    if not chosen:
        where = f" to stream {stream!r}" if stream is not None else ""
        raise NotFound(
            f"table {table} is not captured{where}",
            hint=f"Capture it first: postbus capture {table} {stream or 'STREAM'}; or let the mirror do it:"
            f" --stream {stream or 'STREAM'} --capture.",
        )
    if len(chosen) > 1:
        raise BadArgument(
            f"table {table} is captured to several streams: {', '.join(c.stream for c in chosen)}",
            hint="Say which one to mirror from: stream='...' (--stream).",
        )
    if not chosen[0].keys:
        raise BadArgument(
            f"table {table} has no key: nothing tells its rows apart",
            hint="Give it a primary key, or a unique index over columns that are NOT NULL.",
        )
    return chosen[0]


def _oid(server: Server, table: str) -> int:
    try:
        return int(server.value("select %s::text::regclass::oid", table))
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise NotFound(
            f"table {table} does not exist", hint="Name it with its schema: public.orders."
        ) from None
    except (psycopg.errors.InvalidName, psycopg.errors.SyntaxError) as exc:
        raise BadArgument(f"{table!r} is not the name of a table: {exc.diag.message_primary}") from None


def columns(server: Server, table: Captured) -> list[Column]:
    """The captured columns of a table as the catalog has them now, the key first.

    Raises:
        BadArgument: one of them has a name that a lake table cannot have.
    """
    found = [
        Column(name, no, shown, filled, _kind(base, modifier, nested))
        for name, no, shown, filled, base, modifier, nested in server.rows(_COLUMNS, table.oid)
    ]
    captured = [
        c
        for c in found
        if c.name in table.keys
        or ((table.only is None or c.name in table.only) and c.name not in table.exclude)
    ]
    lower = [c.name.lower() for c in captured]
    for name in (c.name for c in captured):
        twice = lower.count(name.lower()) > 1
        if twice or name.lower() in RESERVED:
            why = "differs from another one only in case" if twice else "has a name that the mirror needs"
            raise BadArgument(
                f"column {name} of table {table.name} {why}",
                hint=f"Rename it, or capture the table without it (exclude => array['{name}']).",
            )
    place = {name: at for at, name in enumerate(table.keys)}
    return sorted(captured, key=lambda c: place.get(c.name, len(place)))


def _kind(base: str, modifier: int, nested: bool) -> Kind:
    if nested:
        return Kind("json")
    if base == "numeric":
        return _decimal(modifier)
    return Kind(_KINDS.get(base, "text"))


def _decimal(modifier: int) -> Kind:
    """Of numeric(p, s), whose scale may be negative or larger than p. Without them its digits have no end."""
    if modifier < 4:
        return Kind("text")
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (((modifier - 4) & 0x7FF) ^ 1024) - 1024
    precision, scale = (precision - scale, 0) if scale < 0 else (max(precision, scale), scale)
    return Kind("decimal", precision, scale) if precision <= MOST_DIGITS else Kind("text")


def backfill(
    server: Server, table: Captured, batch: int, restart: bool, step: Callable[[int, int], None]
) -> None:
    """Publish the rows that the table has, chunk by chunk, until all are published. Writers go on meanwhile.

    With `restart` it does the first chunk from the beginning, and no more.
    """
    query = "select * from postbus.backfill(%s::oid::regclass, %s, %s, %s)"
    while True:
        # Lost connections, deadlocks and lock timeouts are tried again in there.
        rows, done, total, finished = server.rows(query, table.oid, table.stream, batch, restart)[0]
        step(done, total)
        if finished or restart:
            return
        if not rows:
            time.sleep(HELD)
