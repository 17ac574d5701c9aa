"""``archive``: streams to one table of the lake, appended exactly once, by stream and date.

The query's checkpoint holds the offsets, the table the number of the last batch: whatever is killed, the next
run does the same batch again, and the table takes it once. The group ``archive.<name>`` follows, so that the
streams keep what is not archived yet and may truncate the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument, NotFound, PositionLost
from postbus.pipelines import _job
from postbus.pipelines._runs import Recorder, Run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from postbus.lake import LakeTable

KIND = "archive"
PARTITIONS = ("stream", "date")
PER_TASK = 250_000  # events, at most


def archive(
    streams: str | Sequence[str],
    *,
    lake: str | os.PathLike[str],
    dsn: str | None = None,
    spark: SparkSession | None = None,
    table: str = "events",
    format: str = "delta",
    name: str | None = None,
    follow: bool = False,
    every: float = 10.0,
    max_events: int = 1_000_000,
    compact: bool = False,
    skip_lost: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    master: str | None = None,
    progress: _job.Progress | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Append what streams have got since the last run to a table of the lake.

    Args:
        streams: their names. A later run may name more.
        lake: a folder, or a URL. Executors must reach it too.
        dsn: the database; ``POSTBUS_DSN`` by default.
        spark: a session; by default that of this process.
        table: the table in the lake, partitioned by stream and date (UTC).
        format: ``delta`` or ``iceberg``.
        name: of the pipeline, by default that of the table.
        follow: go on as events come, until SIGINT, SIGTERM or `stop`.
        every: seconds between micro-batches, with `follow`.
        max_events: at most so many in a micro-batch.
        compact: put small files together at the end.
        skip_lost: go on from what is left, where events were truncated before they were archived.
        checkpoint: where the offsets are, by default ``<lake>/_postbus/checkpoints/<name>``.
        master: where Spark runs, if there is no session yet.
        progress: called with rows done, rows in all if known, and a text.
        stop: an event that ends the run early; the next one goes on.

    Returns:
        The record of the run.

    Raises:
        PostbusError: bad input, before Spark starts where that is possible; or why the run failed. It can be
            run again: it goes on where it was.
    """
    _job.need_extra()
    lake = _job.lake_path(lake)
    dsn = _job.database(dsn)
    names = _job.check_streams(dsn, [streams] if isinstance(streams, str) else streams)
    name = name or table
    place = _job.checkpoint_path(lake, name, checkpoint)
    options = {"lake": lake, "table": table, "format": format, "checkpoint": place, "streams": names}
    with Recorder(dsn, name, KIND, options, names, f"{KIND}.{name}") as run:
        _job.same_place(run, "lake", "table", "format", "checkpoint")
        target = _open(lake, table, format, dsn, f"{KIND}.{name}")
        done = _job.Checkpoint(place)
        done.check(name, names)
        _check_pair(target, done)
        assert run.group is not None
        _job.ensure_group(dsn, names, run.group)
        before = _size(target)
        watch = _job.Watch(
            run,
            dsn,
            progress,
            f"archive to {table}",
            total=None if follow else _job.count(dsn, done.done(), names),
            size=lambda: max(0, _size(target) - before),
        )
        session = _job.session(spark, name, master)
        reading = {
            "dsn": dsn,
            "subscribe": ",".join(names),
            "startingOffsets": "earliest",
            "group": run.group,
            "maxEventsPerTrigger": str(max_events),
            "maxEventsPerPartition": str(PER_TASK),
            "failOnDataLoss": str(not skip_lost).lower(),
        }
        writing = {
            "dsn": dsn,
            "lake": lake,
            "table": table,
            "lakeFormat": format,
            "partitionBy": ",".join(PARTITIONS),
            "writer": f"{KIND}.{name}",
            "checkpointLocation": place,
        }
        with _job.stopping(stop, interrupt=not follow) as asked:
            try:
                query = _start(session, name, reading, writing, every if follow else None)
                watch.until_end(query, asked)
            except PositionLost as exc:
                raise PositionLost(
                    exc.message,
                    hint="Events were truncated before they were archived. Go on without: --skip-lost.",
                ) from exc
        if compact:
            target.refresh()
            if target.exists():
                target.compact()
        return run.finish()


def _start(
    spark: SparkSession, name: str, reading: dict[str, str], writing: dict[str, str], every: float | None
) -> StreamingQuery:
    try:
        events = spark.readStream.format("postbus").options(**reading).load()
        writer = events.writeStream.format("postbus").queryName(f"{KIND}-{name}").options(**writing)
        return _job.start(writer, every)
    except Exception as exc:
        raise _job.explained(exc) from exc


def _open(lake: str, table: str, format: str, dsn: str, writer: str) -> LakeTable:
    """The table, which is ours or does not exist yet."""
    from postbus.lake import open_table

    found = open_table(lake, table, format=format, dsn=dsn)
    if found.exists():
        found.create(found.schema(), PARTITIONS, writer=writer)  # only checks
    else:
        found.place.check_writable()
    return found


def _check_pair(table: LakeTable, checkpoint: _job.Checkpoint) -> None:
    """Neither the table nor the checkpoint was lost alone: events would be there twice, or not at all."""
    written = table.exists() and bool(table.files())
    if written and checkpoint.query is None:
        raise NotFound(
            f"lake table {table.name} has events, but there is no checkpoint {checkpoint.path}:"
            " they would be archived twice",
            hint="Bring the checkpoint back. Or archive to another table, with another --name.",
        )
    if checkpoint.done() and not table.exists():
        raise BadArgument(
            f"the checkpoint {checkpoint.path} is of events that were archived,"
            f" but there is no lake table {table.name}",
            hint="Bring the table back. Or begin anew: delete the checkpoint.",
        )


def _size(table: LakeTable) -> int:
    table.refresh()
    files: list[Any] = table.files() if table.exists() else []
    return sum(file.size for file in files)
