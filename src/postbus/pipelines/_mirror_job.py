"""What a run of a mirror does, in its order: state and tables, backfill, changes."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument, NotFound
from postbus.pipelines import _job
from postbus.pipelines._mirror_batch import Batches
from postbus.pipelines._mirror_history import NAMES, History
from postbus.pipelines._mirror_query import Changes
from postbus.pipelines._mirror_rows import RESCUED, Kind, Shape, arrow_type, kind_of
from postbus.pipelines._mirror_state import Checkpoint, State
from postbus.pipelines._mirror_table import Captured, Column, backfill, columns
from postbus.pipelines._runs import Recorder, Run
from postbus.spark._server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postbus.lake import LakeTable

KIND = "mirror"
CHUNK = 5_000  # rows of one transaction of the backfill


@dataclass
class Mirror:
    """One mirror, from its capture to its tables in the lake."""

    server: Server
    captured: Captured
    lake: str
    name: str
    format: str
    max_events: int
    every: float
    progress: _job.Progress

    def __post_init__(self) -> None:
        self.group = f"mirror.{self.name}"
        self.writer = f"{KIND}.{self.name}"
        self.checkpoint = Checkpoint(_job.checkpoint_path(self.lake, self.name))
        self.target = self.open(self.name)
        self.history: History | None = None
        self.state: State
        self.renewed = False

    def open(self, name: str) -> LakeTable:
        from postbus.lake import open_table

        return open_table(self.lake, name, format=self.format, dsn=self.server.dsn)

    def run(
        self,
        session: Callable[[], SparkSession],
        history: bool,
        rebuild: bool,
        follow: bool,
        stop: threading.Event | None,
    ) -> Run:
        options = {"table": self.captured.name, "lake": self.lake, "format": self.format, "history": history}
        stream = self.captured.stream
        record = Recorder(self.server.dsn, self.name, KIND, options, [stream], self.group)
        with record as run:
            if not rebuild:
                _job.same_place(run, "lake", "format")
            self.prepare(history, rebuild)
            run.report(since={stream: self.position()}, now=True)
            spark = session()
            if "connect" in type(spark).__module__:
                raise BadArgument(
                    "a mirror does not run through Spark Connect: its merges are made by the driver",
                    hint="Use a session of this process; master (--master) may be that of a cluster.",
                )
            while True:
                self.renewed = False
                self.fill(self.server)
                with _job.stopping(stop, interrupt=not follow) as asked:
                    self.changes(run).apply(spark, self.max_events, self.every if follow else None, asked)
                if asked.is_set() or not self.renewed:
                    break
            if self.checkpoint.begun:
                self.server.release(self.holder)
            until = self.position()
            _job.follow(self.server.dsn, self.group, {stream: until})
            run.report(until={stream: until})
            return run.finish()

    def position(self) -> Any:
        """Up to where the lake table has come."""
        return self.checkpoint.done().get(self.captured.stream, self.state.start)

    # Before the first batch.

    def prepare(self, history: bool, rebuild: bool) -> None:
        """Everything that must be there: the group, the lake tables, the state."""
        found = columns(self.server, self.captured)
        state = None if rebuild or not self.target.exists() else self.checkpoint.load()
        if state is not None:
            self.check(state)
        _job.ensure_group(self.server.dsn, [self.captured.stream], self.group)
        if state is None:
            # Versions that were kept so far are kept on.
            self.begin(found, history or self.open(f"{self.name}_history").exists())
            _job.follow(self.server.dsn, self.group, {self.captured.stream: self.state.start})
            return
        self.state = state
        self.target.create(Shape(self.kinds(found), self.captured.keys).schema(), writer=self.writer)
        state.history = state.history or history
        self.refill(self.server, found, must=self.keep_history())

    def begin(self, found: list[Column], history: bool) -> None:
        """A new mirror. The state is written last: until it is there, the next run begins again."""
        captured = self.captured
        before = self.checkpoint.load()
        self.checkpoint.wipe()
        if before is not None and before.stream != captured.stream:
            # Or the old stream would wait for it.
            with contextlib.suppress(NotFound):
                self.server.rows("select postbus.drop_group(%s, %s)", before.stream, self.group)
        start = self.server.positions([captured.stream], "latest", self.holder)[captured.stream]
        self.state = State(
            captured.name,
            captured.stream,
            list(captured.keys),
            self.format,
            captured.since,
            start,
            signature(found),
            history,
            query=f"mirror-{uuid.uuid4().hex}",
        )
        shape = Shape(tuple((c.name, c.kind) for c in found), captured.keys)
        if not self.target.create(shape.schema(), writer=self.writer):
            self.empty(shape)
        if not self.keep_history() and self.history is not None:
            self.history.end_all(self.state.query)
        self.fill(self.server, restart=True)
        self.checkpoint.save(self.state)

    @property
    def holder(self) -> str:
        return f"mirror-{self.name}"

    def empty(self, shape: Shape) -> None:
        """What an earlier mirror left goes: nobody knows which of its rows are still there."""
        import pyarrow as pa

        if not fits(shape, self.target):
            # A column of a lake table has one type for ever.
            self.target.drop(self.writer)
            self.target = self.open(self.name)
            self.target.create(shape.schema(), writer=self.writer)
            return
        none = shape.schema().append(pa.field("_op", pa.string())).empty_table()
        self.target.merge(none, list(shape.keys), self.state.query, 0, truncate=True)

    def check(self, state: State) -> None:
        """The state is of this table, and of this capture of it."""
        captured = self.captured
        anew = "mirror it under another name (--name), or begin anew with rebuild (--rebuild)."
        for was, now, what in (
            (state.table, captured.name, "table"),
            (state.stream, captured.stream, "stream"),
            (", ".join(state.keys), ", ".join(captured.keys), "key"),
        ):
            if was != now:
                raise BadArgument(
                    f"mirror {self.name!r} has the {what} {was}, not {now}", hint=f"To go on, {anew}"
                )
        if state.captured != captured.since:
            raise BadArgument(
                f"table {captured.name} was captured anew: changes before that may be missing",
                hint=f"To be sure, {anew}",
            )

    def keep_history(self) -> bool:
        """The table of versions, if it is wanted; whether it is new."""
        if not self.state.history:
            return False
        self.history = History(self.open(f"{self.name}_history"), self.lake, self.server.dsn, self.writer)
        shape = self.shape()
        taken = next((name for name in shape.names if name.lower() in NAMES), None)
        if taken is not None:
            raise BadArgument(
                f"column {taken} of table {self.captured.name} has a name that the history needs",
                hint="Rename it, or mirror the table without history.",
            )
        table = self.history.table
        if table.exists() and not fits(shape, table):
            raise BadArgument(
                f"lake table {table.name} has columns of other types than table {self.captured.name} has now",
                hint=f"Move {table.place.uri} elsewhere, or mirror the table under another name (--name).",
            )
        return self.history.create(shape)

    def kinds(self, found: list[Column]) -> tuple[tuple[str, Kind], ...]:
        """The columns of the lake with their types, which stay; then those that are new."""
        there = self.target.schema() if self.target.exists() else []
        now = {c.name: c.kind for c in found}
        kinds = dict(now)
        for field in there:
            kind = now.get(field.name)
            if kind is None or kind_of(arrow_type(kind)) != kind_of(field.type):
                kinds[field.name] = kind_of(field.type)
        kinds.pop(RESCUED, None)
        return tuple(kinds.items())

    def shape(self) -> Shape:
        return Shape(self.kinds(columns(self.server, self.captured)), self.captured.keys)

    # Rows that are there, and columns that come.

    def refill(self, server: Server, found: list[Column], must: bool = False) -> None:
        """Publish all rows again where columns have changed in ways that no event tells of.

        A column that comes with a default has values in rows that nobody touched, and so has one that had
        another name. One with another number or type is another column.
        """
        was = self.state.columns
        # Those that are gone are remembered, by a negative number: their values are still in the lake.
        gone = {name: [-abs(no), type_] for name, (no, type_) in was.items()}
        now = {**gone, **signature(found)}
        numbers = {abs(no) for no, _ in was.values()}
        for column in found:
            told = was.get(column.name)
            silent = column.filled or column.no in numbers
            must = must or (silent if told is None else told != now[column.name])
        if must:
            self.fill(server, restart=True)
            self.renewed = True
        if must or now != was:
            self.state.columns = now
            self.checkpoint.save(self.state)

    def fill(self, server: Server, restart: bool = False) -> None:
        """With `restart` one chunk from the beginning, else all that is missing."""
        backfill(server, self.captured, CHUNK, restart, self.step)

    def step(self, done: int, total: int) -> None:
        self.progress(done, max(done, total), f"backfill of {self.captured.name}")

    def renew(self) -> Shape:
        """Called by a batch, in its thread, that has a column which we do not know."""
        server = Server(self.server.dsn)
        try:
            found = columns(server, self.captured)
            self.refill(server, found)
            if self.renewed:
                self.fill(server)
            return Shape(self.kinds(found), self.captured.keys)
        finally:
            server.close()

    def changes(self, run: Recorder) -> Changes:
        """The query that applies changes from where the lake table is."""
        batches = Batches(
            self.shape(),
            self.target,
            self.history,
            head=self.captured.head,
            query=self.state.query,
            renew=self.renew,
        )
        return Changes(
            dsn=self.server.dsn,
            stream=self.captured.stream,
            group=self.group,
            checkpoint=self.checkpoint,
            start=self.state.start,
            batches=batches,
            run=run,
            tell=lambda done, total: self.progress(done, total, f"mirror of {self.captured.name}"),
        )


def fits(shape: Shape, table: LakeTable) -> bool:
    """Whether the lake table has the types of the shape, where it has its columns."""
    there = {f.name: kind_of(f.type) for f in table.schema()}
    return all(there.get(name) in (None, kind_of(arrow_type(kind))) for name, kind in shape.columns)


def signature(found: list[Column]) -> dict[str, list[Any]]:
    """What makes a column the same one."""
    return {c.name: [c.no, c.type] for c in found}
