"""The sink: a batch of rows published to a stream, or sent to a queue, exactly once.

Tasks stage their rows under the name of their attempt; the driver's commit publishes the attempts that
succeeded and records (query, batch) in one transaction (docs/reference/staging.md). A batch that Spark runs
again is recognised.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, MapType, StringType, StructType

from postbus.errors import BadArgument, NotFound, PostbusError, translated
from postbus.spark import _rows
from postbus.spark._options import needed_dsn, sink_options
from postbus.spark._server import GONE, Server, safe

if TYPE_CHECKING:
    import pyarrow as pa

_KNOWN = ("dsn", "stream", "queue", "priority", "delay", "ttl")
_COLUMNS = ("type", "key", "payload", "blob", "headers")


@dataclass(frozen=True)
class Target:
    """Where rows go."""

    dsn: str
    stream: str | None
    queue: str | None
    priority: int = 0
    delay: str | None = None
    ttl: str | None = None

    def check(self) -> None:
        """Is it there? Asked before the job starts, and again before each commit, so it is cheap."""
        option, name, look = (
            ("stream", self.stream, "select postbus.position(%s, 'earliest')")
            if self.stream is not None
            else ("queue", self.queue, "select postbus.next_due(%s)")
        )
        server = Server(self.dsn)
        try:
            server.check()
            if not server.value(
                "select bool_and(has_function_privilege(p.oid, 'execute')) from pg_proc p"
                " where p.pronamespace = 'postbus'::regnamespace and p.proname in ('stage', 'commit_staged')"
            ):
                raise PostbusError(
                    f"the user of option dsn ({safe(self.dsn)}) may not publish",
                    hint="Grant it: grant postbus_writer to the user.",
                )
            server.rows(look, name)
            for option, text in (("delay", self.delay), ("ttl", self.ttl)):  # noqa: B007 - for the message
                server.rows("select %s::interval", text)
        except NotFound as exc:
            raise NotFound(f"option {option}: {exc.message}", hint=exc.hint) from exc
        except psycopg.DataError as exc:
            raise BadArgument(f"option {option} is not an interval: {text!r}") from exc
        finally:
            server.close()


def parse(raw: Mapping[str, str]) -> Target:
    """The options of the sink."""
    given = sink_options(raw, _KNOWN, "the sink")
    dsn = needed_dsn(given)
    if ("stream" in given) == ("queue" in given):
        raise BadArgument(
            "a sink writes to one stream or one queue",
            hint="Set option stream or option queue; option lake and option table for a lake.",
        )
    if "stream" in given and {"priority", "delay", "ttl"} & set(given):
        raise BadArgument("options priority, delay and ttl are for queues only")
    priority = given.get("priority", "0")
    if not priority.isdigit() or int(priority) > 9:
        raise BadArgument(f"option priority must be 0 to 9, not {priority!r}")
    return Target(
        dsn, given.get("stream"), given.get("queue"), int(priority), given.get("delay"), given.get("ttl")
    )


def check_schema(schema: StructType) -> None:
    """Rows are events: type, key, payload or blob, headers."""
    hint = (
        "Columns are payload (string or binary) or blob (binary), type, key (string), headers (JSON or map)."
    )
    names = schema.fieldNames()
    wrong = next((n for n in names if n not in _COLUMNS), None)
    if wrong is not None:
        raise BadArgument(f"the sink has no column {wrong!r}", hint=f"{hint} Use select().")
    if "payload" not in names and "blob" not in names:
        raise BadArgument("the sink needs a column payload", hint=hint)
    allowed: dict[str, tuple[type, ...]] = {
        "payload": (StringType, BinaryType),
        "blob": (BinaryType,),
        "headers": (StringType, MapType),
    }
    for field in schema.fields:
        if not isinstance(field.dataType, allowed.get(field.name, (StringType,))):
            raise BadArgument(f"column {field.name!r} is {field.dataType.simpleString()}", hint=hint)


@dataclass
class Staged(WriterCommitMessage):
    """What a task has done."""

    attempt: str
    events: int
    query: str
    partition: int


class _Writer:
    def __init__(self, target: Target, schema: StructType, query: str) -> None:
        self.target = target
        self.schema = schema
        self.query = query

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") or self.query
        attempt = f"{query}/{context.partitionId()}/{uuid.uuid4().hex}"
        server = Server(self.target.dsn)
        events = chunk = 0
        try:
            for part in _rows.chunks(iterator):
                self._stage(server, attempt, chunk, part)
                events += part.events
                chunk += 1
        finally:
            server.close()
        return Staged(attempt, events, query, context.partitionId())

    def _stage(self, server: Server, attempt: str, chunk: int, part: _rows.Chunk) -> None:
        try:
            server.rows(
                "select postbus.stage(%s, %s, %b::text[], %b::bytea[], %b::text[], %b::text[], %b::jsonb[])",
                *(attempt, chunk, part.payloads, part.blobs, part.types, part.keys, part.headers),
            )
        except psycopg.errors.InvalidTextRepresentation as exc:
            raise BadArgument(f"headers are not JSON: {exc.diag.message_detail}") from exc
        except psycopg.DataError as exc:
            raise BadArgument(f"a row cannot be stored: {exc.diag.message_primary}") from exc

    def publish(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """One transaction. It can be repeated: a lost answer is asked for again."""
        staged = sorted((m for m in messages if isinstance(m, Staged)), key=lambda m: m.partition)
        if not staged:
            return
        target = self.target
        server = Server(target.dsn)
        try:
            server.rows(
                "select postbus.commit_staged(%s, %s, %s::text[], %s, %s, %s, %s,"
                " %s::interval, %s::interval)",
                *(staged[0].query, batch, [m.attempt for m in staged], sum(m.events for m in staged)),
                *(target.stream, target.queue, target.priority, target.delay, target.ttl),
            )
        finally:
            server.close()

    def discard(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget what was staged; what this does not reach, upkeep sweeps."""
        attempts = [m.attempt for m in messages if isinstance(m, Staged)]
        if attempts:
            server = Server(self.target.dsn)
            try:
                with translated():
                    server.connection().execute("select postbus.discard_staged(%s::text[])", [attempts])
            except GONE:
                pass  # nobody will miss them
            finally:
                server.close()


class StreamWriter(DataSourceStreamArrowWriter):
    """Of a streaming query: batches have numbers, and the query has an id that outlives restarts."""

    def __init__(self, target: Target, schema: StructType) -> None:
        self._writer = _Writer(target, schema, "")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage, in a task."""
        return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish, in the driver."""
        self._writer.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Forget, in the driver."""
        self._writer.discard(messages)


class BatchWriter(DataSourceArrowWriter):
    """Of a batch: all of it or nothing. Saved again, it is published again."""

    def __init__(self, target: Target, schema: StructType) -> None:
        self._writer = _Writer(target, schema, f"batch-{uuid.uuid4().hex}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage, in a task."""
        return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish, in the driver."""
        self._writer.publish(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget, in the driver."""
        self._writer.discard(messages)
