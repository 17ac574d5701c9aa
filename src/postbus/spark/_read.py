"""What a task does: read the events of its parts as Arrow batches.

A part is read in slices of ids that are sized by what comes: large enough to be quick, small enough for
memory, whatever the payloads weigh. A slice is complete before it is handed on:
a lost connection costs a slice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from postbus.errors import PositionLost
from postbus.spark._options import DATA
from postbus.spark._payload import parse_payloads
from postbus.spark._server import GONE, Server

if TYPE_CHECKING:
    import pyarrow as pa

WORTH_ADBC = 5_000  # events; below that its connection costs more than it saves
FIRST_SLICE, LARGEST_SLICE = 2_000, 100_000  # ids
FULL = 16 * 2**20  # bytes that a slice should not exceed by much
TRIES = 8
LOST = "PB005"

# One connection per process and server, kept: workers are used again.
_servers: dict[str, Server] = {}
_adbc: dict[str, Any] = {}


@dataclass
class Part(InputPartition):
    """What one task reads: parts of windows, each with its stream and an estimate of its events."""

    parts: list[tuple[str, str, int]]

    def __post_init__(self) -> None:
        super().__init__(None)


@dataclass(frozen=True)
class Task:
    """How to read: pickled with the reader and sent to the executors."""

    dsn: str
    columns: tuple[str, ...]
    schema: StructType
    payload_schema: StructType | None
    types: tuple[str, ...] | None
    keys: tuple[str, ...] | None
    fail_on_data_loss: bool

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        """The events of a partition."""
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self.schema, timezone="UTC")
        for stream, text, events in part.parts:
            for table in self._slices(stream, text, events):
                full = self._complete(table, stream)
                yield from full.select(schema.names).cast(schema).combine_chunks().to_batches()

    def _slices(self, stream: str, text: str, events: int) -> Iterator[pa.Table]:
        part = json.loads(text)
        after, upto, width = part["after"], part["upto"], FIRST_SLICE
        while after < upto:
            to = min(upto, after + width)
            try:
                table = self._slice(stream, json.dumps({**part, "after": after, "upto": to}), events)
            except PositionLost:
                if self.fail_on_data_loss:
                    raise
                return
            if table.num_rows:
                yield table
            width = max(1, min(LARGEST_SLICE, FULL * (to - after) // max(table.nbytes, 1)))
            after = to

    def _slice(self, stream: str, part: str, events: int) -> pa.Table:
        query = self._query(stream, part)
        pause = 0.1
        for attempt in range(TRIES):
            try:
                if events >= WORTH_ADBC and _has_adbc():
                    return _by_adbc(self.dsn, query)
                return _by_psycopg(self.dsn, query)
            except GONE:
                if attempt == TRIES - 1:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 5.0)
        raise AssertionError

    def _query(self, stream: str, part: str) -> str:
        casts = {"lane": "r.lane::int as lane", "headers": "r.headers::text as headers", "at": "r.at"}
        wanted = [c for c in self.columns if c not in ("stream", DATA)]
        if DATA in self.columns and "payload" not in wanted:
            wanted.append("payload")
        chosen = sql.SQL(", ").join(sql.SQL(casts.get(c, f"r.{c}")) for c in wanted or ["id"])
        arguments: list[sql.Composable] = [sql.Literal(stream), sql.Literal(part)]
        for name, values in (("types", self.types), ("keys", self.keys)):
            if values is not None:
                arguments.append(sql.SQL("{} => {}::text[]").format(sql.SQL(name), sql.Literal(list(values))))
        call = sql.SQL("select {} from postbus.read_window({}) r")
        return call.format(chosen, sql.SQL(", ").join(arguments)).as_string(None)

    def _complete(self, table: pa.Table, stream: str) -> pa.Table:
        import pyarrow as pa

        if "stream" in self.columns:
            table = table.append_column("stream", pa.repeat(pa.scalar(stream, pa.string()), table.num_rows))
        if self.payload_schema is not None and DATA in self.columns:
            table = table.append_column(DATA, parse_payloads(table["payload"], self.payload_schema))
        return table


def _has_adbc() -> bool:
    try:
        import adbc_driver_postgresql.dbapi  # noqa: F401
    except ImportError:
        return False
    return True


def _by_adbc(dsn: str, query: str) -> pa.Table:
    import adbc_driver_manager
    import adbc_driver_postgresql.dbapi as adbc

    try:
        conn = _adbc.get(dsn)
        if conn is None:
            conn = _adbc[dsn] = adbc.connect(dsn, autocommit=True)
        with conn.cursor() as cur:
            cur.execute(query)
            return cur.fetch_arrow_table()
    except adbc_driver_manager.Error as exc:
        _adbc.pop(dsn, None)
        if exc.sqlstate == LOST:
            raise PositionLost(str(exc)) from exc
        # Whatever else it is, psycopg says it in the terms that the rest of the code knows.
        return _by_psycopg(dsn, query)


def _by_psycopg(dsn: str, query: str) -> pa.Table:
    import pyarrow as pa

    server = _servers.setdefault(dsn, Server(dsn))
    try:
        conn = server.connection()
        with conn.cursor(binary=True) as cur:
            cur.execute(query.encode())
            names = [c.name for c in cur.description or []]
            rows = cur.fetchall()
    except psycopg.Error as exc:
        server.close()
        if exc.sqlstate == LOST:
            raise PositionLost(str(exc), hint=exc.diag.message_hint, sqlstate=LOST) from exc
        raise
    kinds = {
        "id": pa.int64(),
        "tick": pa.int64(),
        "lane": pa.int32(),
        "blob": pa.binary(),
        "at": pa.timestamp("us", "UTC"),
    }
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    arrays = [pa.array(c, kinds.get(n, pa.string())) for n, c in zip(names, columns, strict=True)]
    return pa.Table.from_arrays(arrays, names=names)
