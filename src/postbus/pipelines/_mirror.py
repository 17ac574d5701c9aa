"""`mirror`: a captured table as a table of the lake that holds the same rows.

First the rows that are there are published (backfill), then the changes are followed; the order of events
makes one table of both. docs/reference/mirror.md says what comes out.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING

from postbus.errors import BadArgument
from postbus.pipelines import _job
from postbus.pipelines._mirror_job import Mirror
from postbus.pipelines._mirror_table import Captured, columns, find
from postbus.pipelines._runs import Run
from postbus.spark._server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_EVENTS = 200_000  # a batch is merged in the memory of this process


def mirror(
    table: str,
    *,
    lake: str | os.PathLike[str],
    name: str | None = None,
    format: str = "delta",
    dsn: str | None = None,
    spark: SparkSession | None = None,
    stream: str | None = None,
    capture: bool = False,
    history: bool = False,
    follow: bool = False,
    every: float = 1.0,
    rebuild: bool = False,
    max_events: int | None = None,
    master: str | None = None,
    progress: _job.Progress | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Bring a table of the lake up to date with a captured table of the database.

    Args:
        table: the table, with its schema where that is needed.
        lake: a folder, or a URL.
        name: of the pipeline and of the lake table; by default that of the table.
        format: ``delta`` or ``iceberg``.
        dsn: the database, ``POSTBUS_DSN`` by default.
        spark: the session to use, by default that of this process.
        stream: which capture, where the table has several.
        capture: capture the table to `stream` if it is not captured yet.
        history: keep every version of every row too, in ``<name>_history``. Once on, it stays on.
        follow: go on as changes come, until SIGINT, SIGTERM or `stop`.
        every: seconds between micro-batches, with `follow`.
        rebuild: begin anew: empty the lake table and publish all rows again.
        max_events: at most so many in a micro-batch, 200,000 by default: it is merged in memory.
        master: where Spark runs, if there is no session yet.
        progress: called with events done, events in all if that is known, and a text.
        stop: an event that ends a run with `follow`.

    Returns:
        The record of the run. ``until`` is the position up to which the lake table shows the table.

    Raises:
        NotFound: the table is missing, or not captured.
        BadArgument: the table cannot be mirrored, or not by this pipeline.

    Example:
        >>> mirror("shop.orders", lake="/data/lake", dsn=dsn).rows  # doctest: +SKIP
        1204
    """
    _job.need_extra()
    known = _job.database(dsn)
    if max_events is not None and max_events < 1:
        raise BadArgument(f"max_events must be at least 1, not {max_events}")
    server = Server(known)
    try:
        captured = find(server, table, stream, capture)
        one = Mirror(
            server=server,
            captured=captured,
            lake=_job.lake_path(lake),
            name=checked_name(name, captured),
            format=format,
            max_events=max_events or MAX_EVENTS,
            every=every,
            progress=progress or (lambda done, total, text: None),
        )
        columns(server, captured)  # what cannot be mirrored is refused before anything is made
        return one.run(lambda: _job.session(spark, one.name, master), history, rebuild, follow, stop)
    finally:
        server.close()


def checked_name(name: str | None, captured: Captured) -> str:
    """The name of the pipeline: the table's, with its schema where that is not public."""
    if name is None:
        plain = captured.table if captured.schema == "public" else f"{captured.schema}_{captured.table}"
        name = re.sub(r"[^A-Za-z0-9_-]", "_", plain)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,47}", name):
        raise BadArgument(
            f"{name!r} is no name for a mirror",
            hint="Set name (--name): 1 to 48 letters, digits, _ or -; the first is a letter or _.",
        )
    return name
