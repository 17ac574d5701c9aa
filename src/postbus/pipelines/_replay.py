"""``replay``: archived events back into a stream or a queue, in their order, at a set rate, exactly once.

The first run pins the version of the table and the size of a batch: from then on batch n is the same events
for ever. Each batch is staged and committed under its number (docs/reference/staging.md), so a run that was
killed is followed by one that goes on, and a batch that comes again is recognised.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from postbus.errors import BadArgument, NotFound
from postbus.pipelines import _job
from postbus.pipelines._runs import Recorder, Run
from postbus.spark._server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KIND = "replay"
FROM = "postbus-replayed-from"  # the header that says where an event came from
COLUMNS = ("stream", "id", "type", "key", "payload", "blob", "headers")
PER_SECOND = 4  # commits, where a rate is set and batches allow it


def replay(
    *,
    lake: str | os.PathLike[str],
    to_stream: str | None = None,
    to_queue: str | None = None,
    dsn: str | None = None,
    spark: SparkSession | None = None,
    table: str = "events",
    format: str = "delta",
    streams: Sequence[str] | None = None,
    since: datetime | str | None = None,
    until: datetime | str | None = None,
    types: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    rate: float | None = None,
    batch: int = 1000,
    name: str | None = None,
    master: str | None = None,
    progress: _job.Progress | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Publish archived events again: by stream, time, type and key, in the order of stream and id.

    Each gets the header ``postbus-replayed-from`` (``orders/17``) next to those it had. Called again with the
    same `name`, it goes on where it was; when all is done it does nothing.

    Args:
        lake: a folder, or a URL.
        to_stream: the stream to publish to; or
        to_queue: the queue to send to.
        dsn: the database; ``POSTBUS_DSN`` by default.
        spark: a session; by default that of this process.
        table: the table in the lake, as `archive` writes it.
        format: ``delta`` or ``iceberg``.
        streams: only events of these streams.
        since: only events published then or later; with a time zone.
        until: only events published before then.
        types: only events of these types.
        keys: only events with these keys.
        rate: at most so many events per second.
        batch: events per transaction. With a `rate` they are fewer, to spread them.
        name: of the pipeline. A new one by default.
        master: where Spark runs, if there is no session yet.
        progress: called with rows done, rows in all if known, and a text.
        stop: an event that ends the run early; it can be continued.

    Raises:
        PostbusError: bad input, before Spark starts where that is possible; or why the run failed.
    """
    _job.need_extra()
    from postbus.lake import open_table

    lake = _job.lake_path(lake)
    asked = _Asked(
        lake=lake, table=table, format=format, to_stream=to_stream, to_queue=to_queue,
        streams=_list(streams), since=_time("since", since), until=_time("until", until), types=_list(types),
        keys=_list(keys),
    )  # fmt: skip
    if batch < 1 or (rate is not None and rate <= 0):
        raise BadArgument("batch and rate must be above 0")
    dsn = _job.database(dsn)
    asked.check_target(dsn)
    found = open_table(lake, table, format=format, dsn=dsn)
    if not found.exists():
        raise NotFound(
            f"there is no {format} table {table} in lake {lake}", hint="Check --lake, --table and --format."
        )
    missing = next((c for c in COLUMNS if c not in found.schema().names), None)
    if missing is not None:
        raise BadArgument(
            f"lake table {table} has no column {missing}", hint="Replay reads what archive has written."
        )
    name = name or f"replay-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
    options = asked.options() | {"rate": rate}
    with Recorder(dsn, name, KIND, options) as run:
        _job.same_place(run, *asked.options())
        plan = run.before.get("since") or {
            "query": f"{KIND}-{name}-{uuid.uuid4().hex}",
            "version": found.version(),
            "batch": batch if rate is None else max(1, min(batch, int(rate / PER_SECOND))),
        }
        place = _Place.of(run.before.get("until"))
        run.report(since=plan, until=place.offsets(), now=True)
        if not place.finished:
            try:
                events = asked.events(_job.session(spark, name, master), dsn, plan["version"])
                if "total" not in plan:
                    plan = {**plan, "total": events.count()}
                    run.report(since=plan, total=plan["total"], now=True)
                rest = _after(events, place)
                _Replayer(run, dsn, asked, plan, rate, progress, stop).all(rest, place)
            except Exception as exc:
                raise _job.explained(exc) from exc
        return run.finish()


def _list(values: Sequence[str] | None) -> list[str] | None:
    if isinstance(values, str):
        values = [values]
    return sorted(set(values)) if values else None


def _time(option: str, value: datetime | str | None) -> str | None:
    """A time in UTC, as text: that is how it is recorded."""
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise BadArgument(
            f"option {option} is not a time with a zone: {value}",
            hint="Write it as 2026-01-31T12:00:00Z or 2026-01-31 12:00:00+01:00.",
        )
    return found.astimezone(UTC).isoformat()


@dataclass(frozen=True)
class _Asked:
    """What to replay, and where to."""

    lake: str
    table: str
    format: str
    to_stream: str | None
    to_queue: str | None
    streams: list[str] | None
    since: str | None
    until: str | None
    types: list[str] | None
    keys: list[str] | None

    def options(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def check_target(self, dsn: str) -> None:
        """There is one target, and it exists."""
        if (self.to_stream is None) == (self.to_queue is None):
            raise BadArgument(
                "a replay goes to one stream or one queue", hint="Set --to-stream or --to-queue."
            )
        server = Server(dsn)
        try:
            if self.to_stream is not None:
                server.rows("select postbus.position(%s, 'earliest')", self.to_stream)
            else:
                server.rows("select postbus.next_due(%s)", self.to_queue)
        finally:
            server.close()

    def events(self, spark: SparkSession, dsn: str, version: int | None) -> DataFrame:
        """The events that were asked for, of one version of the table."""
        from pyspark.sql import functions as f

        from postbus.spark import read_lake

        df = read_lake(spark, self.lake, self.table, format=self.format, dsn=dsn, version=version)
        for column, values in (("stream", self.streams), ("type", self.types), ("key", self.keys)):
            if values is not None:
                df = df.where(f.col(column).isin(values))
        # Files lie in folders by date: those of other days need not be opened.
        if self.since is not None:
            df = df.where(f.col("at") >= f.lit(datetime.fromisoformat(self.since)))
            if "date" in df.columns:
                df = df.where(f.col("date") >= f.lit(datetime.fromisoformat(self.since).date()))
        if self.until is not None:
            df = df.where(f.col("at") < f.lit(datetime.fromisoformat(self.until)))
            if "date" in df.columns:
                df = df.where(f.col("date") <= f.lit(datetime.fromisoformat(self.until).date()))
        return df.select(*COLUMNS)


@dataclass(frozen=True)
class _Place:
    """How far a replay is: so many batches, the last of which ended with this event."""

    batches: int = 0
    events: int = 0
    stream: str | None = None
    id: int | None = None
    finished: bool = False

    @classmethod
    def of(cls, offsets: dict[str, Any] | None) -> _Place:
        return cls(**offsets) if offsets else cls()

    def offsets(self) -> dict[str, Any]:
        return dict(self.__dict__)


def _after(events: DataFrame, place: _Place) -> DataFrame:
    from pyspark.sql import functions as f

    if place.stream is not None and place.id is not None:
        same = f.col("stream") == place.stream
        events = events.where((f.col("stream") > place.stream) | (same & (f.col("id") > place.id)))
    return events.orderBy("stream", "id")


class _Replayer:
    """Batches on their way, one after another."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        run: Recorder,
        dsn: str,
        asked: _Asked,
        plan: dict[str, Any],
        rate: float | None,
        progress: _job.Progress | None,
        stop: threading.Event | None,
    ) -> None:
        self.run = run
        self.asked = asked
        self.plan = plan
        self.rate = rate
        self.progress = progress
        self.stop = stop or threading.Event()
        self.server = Server(dsn)

    def all(self, events: DataFrame, place: _Place) -> None:
        """Everything that is left."""
        due, before = 0.0, place.events
        rows = iter(events.toLocalIterator(prefetchPartitions=True))
        try:
            self.tell(place, before)
            while page := list(islice(rows, self.plan["batch"])):
                self.wait(due)
                if self.stop.is_set():
                    return
                # Time that was lost is not made up for: that would be a burst.
                due = time.monotonic() + len(page) / self.rate if self.rate is not None else 0.0
                self.publish(place.batches, page)
                last = page[-1]
                place = _Place(place.batches + 1, place.events + len(page), last.stream, last.id)
                self.tell(place, before)
            self.tell(_Place(place.batches, place.events, place.stream, place.id, finished=True), before)
        finally:
            self.server.close()

    def wait(self, until: float) -> None:
        """Until it is time, with a sign of life now and then."""
        while (left := until - time.monotonic()) > 0 and not self.stop.wait(min(left, 1.0)):
            self.run.report()

    def tell(self, place: _Place, before: int) -> None:
        """Report."""
        self.run.report(rows=place.events - before, until=place.offsets())
        if self.progress is not None:
            self.progress(place.events, self.plan["total"], f"replay of {self.asked.table}")

    def publish(self, number: int, page: list[Any]) -> None:
        """One batch in one transaction, unless it is there already."""
        for attempts_left in (2, 1, 0):
            attempt = f"{self.plan['query']}/{number}/{uuid.uuid4().hex}"
            for chunk, (is_blob, rows) in enumerate(_chunks(page)):
                self.stage(attempt, chunk, is_blob, rows)
            try:
                self.server.rows(
                    "select postbus.commit_staged(%s, %s, %s::text[], %s, %s, %s)",
                    *(self.plan["query"], number, [attempt], len(page)),
                    *(self.asked.to_stream, self.asked.to_queue),
                )
            except NotFound as exc:
                # A crash of the server empties what was staged: once more.
                if "staged" not in exc.message or not attempts_left:
                    raise
            else:
                return

    def stage(self, attempt: str, chunk: int, is_blob: bool, rows: list[Any]) -> None:
        bodies = [bytes(r.blob) if is_blob else r.payload for r in rows]
        self.server.rows(
            "select postbus.stage(%s, %s, %b::text[], %b::bytea[], %b::text[], %b::text[], %b::jsonb[])",
            attempt,
            chunk,
            None if is_blob else bodies,
            bodies if is_blob else None,
            [r.type for r in rows],
            [r.key for r in rows],
            [_headers(r) for r in rows],
        )


def _chunks(page: list[Any]) -> Iterator[tuple[bool, list[Any]]]:
    """Runs of events with a payload, and of events with a blob."""
    for is_blob, rows in groupby(page, key=lambda r: r.payload is None):
        yield is_blob, list(rows)


def _headers(row: Any) -> Jsonb:
    had = json.loads(row.headers) if row.headers else {}
    return Jsonb({**had, FROM: f"{row.stream}/{row.id}"})
