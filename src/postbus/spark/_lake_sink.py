"""The lake sink: tasks write Parquet files, and the commit of a batch adds them to a table at once.

A streaming batch is recorded with the table, in the same commit, under the query's id: one that Spark runs
again is recognised. Files of attempts that failed belong to no commit: nobody reads them, and vacuum deletes
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import FileType
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from postbus.errors import BadArgument, PostbusError
from postbus.lake import FileWriter, LakeFile, LakeTable, Layout, open_table
from postbus.lake._expand import MOST_COLUMNS, Expander
from postbus.lake._schema import RESCUED, conform, grown
from postbus.spark._options import list_of, number, sink_options

_KNOWN = ("lake", "table", "lakeFormat", "partitionBy", "dsn", "expand", "maxColumns", "writer")
DATE, AT = "date", "at"


@dataclass(frozen=True)
class Target:
    """Where rows go, and how."""

    lake: str
    table: str
    format: str
    dsn: str | None
    partition_by: tuple[str, ...]
    expand: str | None
    most_columns: int
    writer: str

    def open(self) -> LakeTable:
        """The table, which need not exist."""
        return open_table(self.lake, self.table, format=self.format, dsn=self.dsn)


def parse(raw: Mapping[str, str]) -> Target:
    """The options of the lake sink."""
    given = sink_options(raw, _KNOWN, "the lake sink")
    if "table" not in given:
        raise BadArgument(
            "option table is missing", hint="Name the table of the lake: .option('table', 'events')."
        )
    kind = given.get("lakeFormat", "delta").strip().lower()
    if kind not in ("delta", "iceberg"):
        raise BadArgument(f"option lakeFormat must be delta or iceberg, not {given['lakeFormat']!r}")
    if "maxColumns" in given and "expand" not in given:
        raise BadArgument("option maxColumns has no meaning without expand")
    return Target(
        lake=given["lake"],
        table=given["table"],
        format=kind,
        dsn=given.get("dsn") or os.environ.get("POSTBUS_DSN") if kind == "iceberg" else None,
        partition_by=list_of(given, "partitionBy") or (),
        expand=given.get("expand"),
        most_columns=number(given, "maxColumns", 10_000) or MOST_COLUMNS,
        writer=given.get("writer") or "spark",
    )


def wanted(target: Target, schema: StructType) -> pa.Schema:
    """The columns of the rows as the lake gets them, without those that expand will find."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    if DATE in target.partition_by and DATE not in arrow.names:
        if AT not in arrow.names or not pa.types.is_timestamp(arrow.field(AT).type):
            raise BadArgument(
                "option partitionBy names date, and the rows have neither date nor at",
                hint="Select the column at (a timestamp), from which date is made, or date itself.",
            )
        arrow = arrow.append(pa.field(DATE, pa.date32()))
    if target.expand is not None:
        if target.expand not in arrow.names or not pa.types.is_string(arrow.field(target.expand).type):
            raise BadArgument(
                f"option expand names {target.expand!r}, which is no column of texts",
                hint=f"Columns are {', '.join(arrow.names)}.",
            )
        if RESCUED in arrow.names:
            raise BadArgument(f"with option expand the rows cannot have a column {RESCUED}")
        arrow = arrow.append(pa.field(RESCUED, pa.string()))
    return arrow


@dataclass
class Written(WriterCommitMessage):
    """What a task has done."""

    files: list[LakeFile]
    query: str | None
    partition: int


@dataclass
class _Writer:
    """Goes to the tasks, so it holds only what they need."""

    target: Target
    schema: pa.Schema  # of the rows, in the types of the table
    known: pa.Schema  # of the table
    layout: Layout
    table: LakeTable | None = None  # in the driver only

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "table": None}

    @classmethod
    def of(cls, target: Target, schema: StructType) -> _Writer:
        """Create the table or check it: everything that can be wrong is said before the job starts."""
        table = target.open()
        arrow = wanted(target, schema)
        table.create(arrow, target.partition_by, writer=target.writer)
        known = grown(table.schema(), table.plain(arrow), table.name)
        typed = pa.schema([known.field(name) for name in arrow.names])
        return cls(target, typed, known, table.layout, table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write the rows of one task."""
        context = TaskContext.get()
        assert context is not None
        expand = self.target.expand
        given = pa.schema([f for f in self.schema if f.name != RESCUED or expand is None])
        expander = Expander(expand, given.names, self.known, self.target.most_columns) if expand else None
        with FileWriter(self.layout) as writer:
            for batch in iterator:
                typed = conform(_dated(batch, given), given)
                writer.write(expander.expand(typed) if expander else typed)
        query = context.getLocalProperty("sql.streaming.queryId")
        return Written(writer.files, query, context.partitionId())

    def publish(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """One commit."""
        written = sorted((m for m in messages if isinstance(m, Written)), key=lambda m: m.partition)
        files = [file for m in written for file in m.files]
        if files:
            self._check_there(files)
            table = self.table or self.target.open()
            table.append(files, self.schema, written[0].query, batch)

    def _check_there(self, files: list[LakeFile]) -> None:
        """A folder that each machine has for itself would give a table without files."""
        place = self.layout.place
        there = place.fs.get_file_info([place.path(file.path) for file in files])
        lost = next((info.path for info in there if info.type != FileType.File), None)
        if lost is not None:
            raise PostbusError(
                f"a task has written {lost}, and the driver does not find it",
                hint="The lake must be the same for all machines: a shared folder, or a URL. Nothing was"
                " published.",
            )


def _dated(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if DATE in schema.names and DATE not in batch.schema.names:
        # The day in UTC, whatever zone the session has.
        at: Any = pc.cast(batch.column(AT), pa.timestamp("us", "UTC"))
        batch = batch.append_column(DATE, pc.cast(at.cast(pa.timestamp("us")), pa.date32(), safe=False))
    return batch


class StreamWriter(DataSourceStreamArrowWriter):
    """Of a streaming query: batches have numbers, and the query has an id that outlives restarts."""

    def __init__(self, target: Target, schema: StructType) -> None:
        self._writer = _Writer.of(target, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write files, in a task."""
        return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Add them to the table, in the driver."""
        self._writer.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: Spark also calls this after a commit whose answer was lost, and then the files count."""


class BatchWriter(DataSourceArrowWriter):
    """Of a batch: all of it or nothing. Saved again, it is added again."""

    def __init__(self, target: Target, schema: StructType) -> None:
        self._writer = _Writer.of(target, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write files, in a task."""
        return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Add them to the table, in the driver."""
        self._writer.publish(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: Spark also calls this after a commit whose answer was lost, and then the files count."""
