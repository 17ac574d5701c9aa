"""What a task does: read the events of its parts as Arrow batches.

A part is read in slices of ids that are sized by what comes: large enough to be quick, small enough for
memory, whatever the payloads weigh. A slice is complete before it is handed on:
a lost connection costs a slice.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from postbus.errors import PositionLost
from postbus.spark import _columns
from postbus.spark._options import DATA
from postbus.spark._payload import parse_payloads
from postbus.spark._server import GONE, Server

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_SLICE, LARGEST_SLICE = 200, 100_000  # ids
CHUNK = 8_000  # ids of a largest slice that the server puts together
BATCH = 2**19  # bytes that are worth an Arrow batch
FULL = 16 * 2**20  # bytes that a slice should not exceed by much
TRIES = 8
LOST = "PB005"
TOO_LARGE = (psycopg.errors.ProgramLimitExceeded, psycopg.errors.OutOfMemory)  # a value has 1 GB at most

# One connection per process and server, kept: workers are used again.
_servers: dict[str, Server] = {}


def _server(dsn: str) -> Server:
    if not _servers:
        # The process begins to work. Spark collects garbage after every task: what is there now need not be
        # looked through again. And of freed memory the C library keeps twice the largest block that it has
        # seen: slices then find theirs again.
        gc.freeze()
        bytearray(FULL)
    return _servers.setdefault(dsn, Server(dsn))


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
        for stream, text, _ in part.parts:
            for table in self._tables(stream, text):
                full = self._complete(table, stream)
                yield from full.select(schema.names).cast(schema).combine_chunks().to_batches()

    def _tables(self, stream: str, text: str) -> Iterator[pa.Table]:
        part = json.loads(text)
        after, upto, width = part["after"], part["upto"], FIRST_SLICE
        while after < upto:
            to = min(upto, after + width)
            try:
                found = self._slice(stream, json.dumps({**part, "after": after, "upto": to}), width)
            except PositionLost:
                if self.fail_on_data_loss:
                    raise
                return
            except TOO_LARGE:
                if width == 1:
                    raise
                width = max(1, width // 16)
                continue
            size = 0
            for table in _columns.tables(found, self._wanted, BATCH):
                size += table.nbytes
                yield table
            width = max(1, min(LARGEST_SLICE, FULL * (to - after) // max(size, 1)))
            after = to

    def _slice(self, stream: str, part: str, width: int) -> psycopg.Cursor[Any]:
        pause = 0.1
        for attempt in range(TRIES):
            try:
                return self._read(stream, part, width)
            except TOO_LARGE:
                raise
            except GONE:
                if attempt == TRIES - 1:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 5.0)
        raise AssertionError

    @property
    def _wanted(self) -> list[str]:
        wanted = [c for c in self.columns if c not in ("stream", DATA)]
        if DATA in self.columns and "payload" not in wanted:
            wanted.append("payload")
        return wanted or ["id"]

    def _read(self, stream: str, part: str, width: int) -> psycopg.Cursor[Any]:
        # A full slice is read in as many chunks as the largest: small ones stay in the processor's cache, and
        # what is made of one has the memory of the last.
        chunk = max(1, width * CHUNK // LARGEST_SLICE)
        server = _server(self.dsn)
        try:
            return server.connection().execute(
                "select * from postbus.read_columns(%s, %s, %s::text[], %s::text[], %s::text[], %s)",
                [stream, part, self._wanted, self._list(self.types), self._list(self.keys), chunk],
                binary=True,
            )
        except psycopg.Error as exc:
            server.close()
            if exc.sqlstate == LOST:
                raise PositionLost(str(exc), hint=exc.diag.message_hint, sqlstate=LOST) from exc
            raise

    @staticmethod
    def _list(values: tuple[str, ...] | None) -> list[str] | None:
        return None if values is None else list(values)

    def _complete(self, table: pa.Table, stream: str) -> pa.Table:
        import pyarrow as pa

        if "stream" in self.columns:
            table = table.append_column("stream", pa.repeat(_columns.text(stream), table.num_rows))
        if self.payload_schema is not None and DATA in self.columns:
            table = table.append_column(DATA, parse_payloads(table["payload"], self.payload_schema))
        return table
