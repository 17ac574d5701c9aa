"""What the pipelines share: the database, the session, checkpoints, groups, progress, and errors of Spark."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psycopg

from postbus.errors import AccessDenied, AlreadyExists, BadArgument, NotFound, PostbusError
from postbus.pipelines._checkpoint import Checkpoint
from postbus.pipelines._runs import Offsets, Recorder
from postbus.spark._server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = [
    "Checkpoint",
    "Interrupted",
    "Progress",
    "Watch",
    "check_streams",
    "checkpoint_path",
    "count",
    "database",
    "ensure_group",
    "explained",
    "follow",
    "lake_path",
    "need_extra",
    "same_place",
    "session",
    "stopping",
]

Progress = Callable[[int, int | None, str], None]  # rows done, rows in all if that is known, what is done
POLL = 0.1  # seconds between looks at a query
SIZE_EVERY = 10.0  # seconds between looks at the size of what was written


def need_extra() -> None:
    """Everything that the extra brings is there.

    Raises:
        PostbusError: something is not installed.
    """
    for module in ("pyspark", "pyarrow", "deltalake"):
        try:
            __import__(module)
        except ImportError as exc:
            raise PostbusError(f"{module} is not installed", hint="pip install 'postbus[spark]'") from exc


def database(dsn: str | None) -> str:
    """The DSN, checked: it can be connected to, and has the engine."""
    chosen = dsn or os.environ.get("POSTBUS_DSN")
    if not chosen:
        raise BadArgument("option dsn is missing", hint="Set it, or the environment variable POSTBUS_DSN.")
    server = Server(chosen)
    try:
        server.check()
    finally:
        server.close()
    return chosen


def session(spark: SparkSession | None, name: str, master: str | None = None) -> SparkSession:
    """The given session, or the one of this process."""
    if spark is not None:
        from postbus.spark._session import activate

        return activate(spark)
    from postbus.spark import session as make

    return make(f"postbus {name}", master=master)


def lake_path(lake: str | os.PathLike[str]) -> str:
    """A folder as an absolute path, a URL as it is: tasks have other working directories."""
    text = os.fspath(lake)
    if not text:
        raise BadArgument("option lake is empty", hint="Name a folder or a URL.")
    return text.rstrip("/") if "://" in text else str(Path(text).expanduser().absolute())


def checkpoint_path(lake: str, pipeline: str, checkpoint: str | os.PathLike[str] | None = None) -> str:
    """Where the query of a pipeline keeps its offsets."""
    return lake_path(checkpoint) if checkpoint is not None else f"{lake}/_postbus/checkpoints/{pipeline}"


def check_streams(dsn: str, streams: Sequence[str]) -> list[str]:
    """The streams, sorted and each once, if they are there.

    Raises:
        NotFound: one is not.
    """
    if not streams:
        raise BadArgument("no stream was named", hint="Name at least one.")
    server = Server(dsn)
    try:
        there = server.streams()
    finally:
        server.close()
    missing = next((s for s in streams if s not in there), None)
    if missing is not None:
        hint = f"There are: {', '.join(there[:20])}." if there else "The database has no streams yet."
        raise NotFound(f"there is no stream {missing!r}", hint=hint)
    return sorted(set(streams))


def ensure_group(dsn: str, streams: Sequence[str], group: str) -> None:
    """Streams have the group that follows the pipeline; it is made where it is missing.

    Raises:
        AccessDenied: it is missing and the user may not make it.
    """
    server = Server(dsn)
    options = '{"ordering": "stream", "start": "earliest"}'
    try:
        there = server.groups()
        for stream in (s for s in streams if (s, group) not in there):
            try:
                server.rows("select postbus.create_group(%s, %s, %s)", stream, group, options)
            except AlreadyExists:
                pass
            except psycopg.errors.InsufficientPrivilege as exc:
                raise AccessDenied(
                    f"stream {stream!r} has no group {group!r}, and this user may not make it",
                    hint=f"As an admin: select postbus.create_group('{stream}', '{group}', '{options}').",
                ) from exc
    finally:
        server.close()


def follow(dsn: str, group: str, positions: Mapping[str, Any]) -> None:
    """Move the group to where the pipeline is: Spark itself would say so only with the next batch."""
    server = Server(dsn)
    try:
        for stream, position in positions.items():
            server.follow(stream, group, position)
    finally:
        server.close()


def count(dsn: str, since: Mapping[str, Any], streams: Sequence[str]) -> int | None:
    """About how many events wait behind positions; None where that cannot be said."""
    server = Server(dsn)
    try:
        total = 0
        latest = server.positions(streams, "latest", None)
        earliest = server.positions([s for s in streams if s not in since], "earliest", None)
        for stream, until in latest.items():
            start = since.get(stream) or earliest[stream]
            total += sum(n for _, n in server.plan(stream, start, until))
    except PostbusError:
        return None
    else:
        return total
    finally:
        server.close()


def same_place(run: Recorder, *names: str) -> None:
    """The run before wrote to the same place: one pipeline has one.

    Raises:
        BadArgument: an option that says where to is another one than before.
    """
    was = run.before.get("options") or {}
    for name in names:
        if name in was and was[name] != run.options.get(name):
            raise BadArgument(
                f"pipeline {run.pipeline!r} has {name} {was[name]!r}, not {run.options.get(name)!r}",
                hint="Use another --name; or, to begin anew:"
                f" select postbus.drop_pipeline('{run.pipeline}').",
            )


class Interrupted(KeyboardInterrupt):
    """A signal has ended a run early."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def stopping(
    stop: threading.Event | None = None, *, signals: bool = True, interrupt: bool = False
) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that a run ends between two looks.

    An exception in the middle of a call to Spark would leave the connection to it out of step.

    Args:
        stop: somebody else's event.
        signals: whether signals set it.
        interrupt: raise `Interrupted` at the end if it was a signal: there was work left.
    """
    event = stop or threading.Event()
    if not signals or threading.current_thread() is not threading.main_thread():
        yield event
        return
    caught: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        event.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupt and caught:
        raise Interrupted(caught[0])


def start(writer: DataStreamWriter, every: float | None) -> StreamingQuery:
    """Start a query: for what is there now, or every so many seconds for what comes."""
    if every is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{int(every * 1000)} milliseconds").start()


class Watch:
    """Follows a streaming query: its batches become reports of the run, and move the group.

    `rows` are those that the query has read in batches that are finished; `since` and `until` the positions
    before the first and after the last of them.
    """

    def __init__(
        self,
        run: Recorder,
        dsn: str,
        progress: Progress | None,
        text: str,
        *,
        total: int | None = None,
        size: Callable[[], int] | None = None,
    ) -> None:
        self.run = run
        self.dsn = dsn
        self.progress = progress
        self.text = text
        self.total = total
        self.size = size  # bytes that were written; asked for now and then
        self.rows = 0
        self.since: Offsets | None = None
        self.until: Offsets | None = None
        self._batch = -1
        self._last: tuple[int, str] | None = None
        self._sized = time.monotonic()

    def until_end(self, query: StreamingQuery, stop: threading.Event | None = None) -> None:
        """Until the query has ended, or was told to.

        Raises:
            PostbusError: the query failed.
        """
        self.tell()
        try:
            while not query.awaitTermination(POLL):  # type: ignore[arg-type]
                self.look(query)
                if stop is not None and stop.is_set():
                    break
        except Exception as exc:
            raise explained(exc) from exc
        finally:
            if query.isActive:
                query.stop()
        self.look(query)
        if self.size is not None:
            self.run.report(bytes=self.size())

    def look(self, query: StreamingQuery) -> None:
        """Take in the batches that were finished since the last look."""
        last = query.lastProgress
        if last is None or (last.batchId, last.timestamp) == self._last:
            self.tell()
            return
        self._last = (last.batchId, last.timestamp)
        moved: Mapping[str, Any] = {}
        for one in query.recentProgress:
            if one.batchId <= self._batch or not one.sources:
                continue
            source = one.sources[0]
            moved = _positions(source.endOffset) or moved
            if one.numInputRows or self.since is None:
                self.since = self.since or _positions(source.startOffset) or dict.fromkeys(moved, "earliest")
            if one.numInputRows:  # else the number comes again, with the next events
                self._batch = one.batchId
                self.rows += one.numInputRows
        if moved:
            if self.run.group is not None and moved != self.until:
                follow(self.dsn, self.run.group, moved)
            self.until = moved
        self.tell()

    def tell(self) -> None:
        """Report."""
        if self.total is not None:
            self.total = max(self.total, self.rows)
        written = None
        if self.size is not None and time.monotonic() > self._sized + SIZE_EVERY:
            written = self.size()
            self._sized = time.monotonic()
        self.run.report(self.rows, written, self.since, self.until, self.total)
        if self.progress is not None:
            self.progress(self.rows, self.total, self.text)


def _positions(offset: str | None) -> dict[str, Any]:
    found = json.loads(offset) if offset else None
    return dict(found["streams"]) if found else {}


def explained(exc: BaseException) -> PostbusError:
    """What a person wants to know of an error of Spark: ours from inside it, or the line that says it."""
    if isinstance(exc, PostbusError):
        return exc
    from postbus.pipelines._explain import explain

    return explain(str(exc), type(exc).__name__)
