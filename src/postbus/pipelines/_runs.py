"""Records of runs: who runs, how far it is, how it ended. docs/reference/pipelines.md has the SQL.

The recorder has a connection of its own, whose session holds the pipeline: a second run is refused, and when
this process dies the server knows. A lost connection is made again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.types.json import Jsonb

from postbus.errors import NotFound, PostbusError, WrongVersion, translated

GONE = (psycopg.OperationalError, psycopg.InterfaceError)
PATIENCE = 120.0  # seconds for a server to come back
EVERY = 1.0  # seconds between reports, but for the first and the last

Offsets = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of a pipeline, as `postbus.list_runs` has it.

    Attributes:
        id: its number.
        pipeline: the name of the pipeline.
        kind: archive, mirror, replay or report.
        rows: how many rows it has written.
        bytes: how many bytes these are where they were written; 0 where that is not known.
        seconds: how long it took.
        since: where it began, per stream or table.
        until: where it ended.
        state: running, done, failed or abandoned.
        error: why it failed.
    """

    id: int
    pipeline: str
    kind: str
    rows: int
    bytes: int
    seconds: float
    since: Offsets | None
    until: Offsets | None
    state: str
    error: str | None = None


class Recorder:
    """A run from its beginning to its end: ``with Recorder(dsn, "events", "archive") as run: ...``.

    Leaving the block ends the run: done, or failed with what was raised.

    Args:
        dsn: the database.
        pipeline: the name of the pipeline.
        kind: archive, mirror, replay or report.
        options: what was asked for, without secrets.
        streams: what it reads.
        group: the group that follows it.

    Raises:
        AlreadyExists: it runs already, or the name is taken by a pipeline of another kind.
    """

    def __init__(  # noqa: PLR0917 - in the order of the SQL function
        self,
        dsn: str,
        pipeline: str,
        kind: str,
        options: Mapping[str, Any] | None = None,
        streams: Sequence[str] | None = None,
        group: str | None = None,
    ) -> None:
        self.dsn = dsn
        self.pipeline = pipeline
        self.kind = kind
        self.options = dict(options or {})
        self.streams = None if streams is None else list(streams)
        self.group = group
        self.id = 0
        self.rows = 0
        self.bytes = 0
        self.total: int | None = None
        self.since: Offsets | None = None
        self.until: Offsets | None = None
        # The offsets and options of the runs before that got anywhere; empty at the first.
        self.before: dict[str, Any] = {}
        self._conn: psycopg.Connection[Any] | None = None
        self._reported = 0.0
        self._ended = False

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        (row,) = self._call(
            "select to_regproc('postbus.begin_run') is not null, to_regproc('postbus.publish') is not null",
            patience=0.0,
        )
        if not row[0]:
            raise (
                WrongVersion("the engine has no pipelines yet", hint="Upgrade it: postbus upgrade.")
                if row[1]
                else NotFound(
                    "there is no postbus engine in this database", hint="Install it: postbus install."
                )
            )
        # Not repeated: whoever has lost the connection here does not know whether a run was begun.
        (row,) = self._call(
            "select postbus.begin_run(%s, %s, %s, %s::text[], %s)",
            *(self.pipeline, self.kind, Jsonb(self.options), self.streams, self.group),
            patience=0.0,
        )
        self.id = int(row[0])
        # A run that failed before it did anything counts for nothing: its options may have been wrong.
        before = self._call(
            "select s.since, s.until, r.options"
            " from postbus.pipeline_stats(1) s, postbus.list_runs(%s, 1001) r"
            " where s.pipeline = %s and r.run < %s and coalesce(r.since, r.until) is not null"
            " order by r.run desc limit 1",
            *(self.pipeline, self.pipeline, self.id),
        )
        if before:
            self.before = dict(zip(("since", "until", "options"), before[0], strict=True))

    def report(
        self,
        rows: int | None = None,
        bytes: int | None = None,
        since: Offsets | None = None,
        until: Offsets | None = None,
        total: int | None = None,
        *,
        now: bool = False,
    ) -> None:
        """Say how far the run is, in all. What is left out stays as it was.

        Call it as often as you like, also with nothing: the database hears of it once a second, or at once
        with `now`.

        Raises:
            LeaseLost: the session was lost, and another run has taken the place of this one.
        """
        self.rows = self.rows if rows is None else rows
        self.bytes = self.bytes if bytes is None else bytes
        self.since = self.since if since is None else since
        self.until = self.until if until is None else until
        self.total = self.total if total is None else total
        if now or time.monotonic() >= self._reported + EVERY:
            self._call(
                "select postbus.report_run(%s, %s, %s, %s, %s, %s)",
                *(self.id, self.rows, self.bytes, _json(self.since), _json(self.until), self.total),
            )
            self._reported = time.monotonic()

    def finish(self) -> Run:
        """End the run, and return its record. The end of the block does this too, where nobody has."""
        self.report(now=True)
        self._call("select postbus.end_run(%s)", self.id)
        self._ended = True
        (row,) = self._call(
            "select run, pipeline, kind, rows, bytes, seconds, since, until, state, error"
            " from postbus.list_runs(%s) where run = %s",
            *(self.pipeline, self.id),
        )
        return Run(*row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._ended:
                self._fail(error)
            elif not self._ended:
                self.finish()
        finally:
            self.close()

    def _fail(self, error: BaseException) -> None:
        """What went wrong first is what counts: that it cannot be recorded is not raised."""
        try:
            values = (self.id, self.rows, self.bytes, _json(self.since), _json(self.until), self.total)
            self._call("select postbus.report_run(%s, %s, %s, %s, %s, %s)", *values, patience=5.0)
            self._call("select postbus.end_run(%s, %s)", self.id, _text(error), patience=5.0)
        except (psycopg.Error, PostbusError):
            pass

    def close(self) -> None:
        """Give the connection up. A run that has not ended is abandoned with it."""
        if self._conn is not None:
            self._conn.close()

    def _connect(self) -> psycopg.Connection[Any]:
        conn = psycopg.connect(
            self.dsn,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=10,
            application_name=f"postbus pipeline {self.pipeline}"[:63],
        )
        # The server is to notice within a minute that this machine is gone, not after two hours.
        for name, value in (("idle", 30), ("interval", 10), ("count", 3)):
            conn.execute(f"set tcp_keepalives_{name} = {value}".encode())
        return conn

    def _call(self, query: str, *args: Any, patience: float = PATIENCE) -> list[Any]:
        """Run a statement that can be repeated; while the connection is lost, make it again."""
        deadline = time.monotonic() + patience
        pause = 0.05
        while True:
            try:
                with translated():
                    if self._conn is None or self._conn.closed:
                        self._conn = self._connect()
                    return self._conn.execute(query.encode(), args).fetchall()
            except GONE:
                if self._conn is not None:
                    self._conn.close()
                if time.monotonic() >= deadline:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 5.0)


def _json(value: Offsets | None) -> Jsonb | None:
    return None if value is None else Jsonb(value)


def _text(error: BaseException) -> str:
    """What a record keeps of an error: what a person would read."""
    if isinstance(error, PostbusError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    first = str(error).strip() or type(error).__name__
    return first if len(first) <= 1000 else f"{first[:1000]} ..."
