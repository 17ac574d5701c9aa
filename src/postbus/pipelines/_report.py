"""`report`: what went through streams and queues, as lake tables and as one HTML page.

docs/reference/report.md says what the figures are.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument, NotFound, PostbusError
from postbus.pipelines import _job
from postbus.pipelines._report_data import Scope, check_queues, check_streams, events, messages
from postbus.pipelines._report_figures import Figures, Rows, count
from postbus.pipelines._runs import Recorder, Run
from postbus.spark._server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = "events"  # the table that archives are in, unless they were told otherwise
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def report(
    *,
    dsn: str | None = None,
    lake: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "report.html",
    streams: Sequence[str] | None = None,
    queues: Sequence[str] | None = None,
    since: datetime | str | None = None,
    until: datetime | str | None = None,
    bucket: float | str | None = None,
    session_gap: float | str = "30m",
    top: int = 20,
    table: str | None = None,
    format: str = "delta",
    name: str = "report",
    master: str | None = None,
    spark: SparkSession | None = None,
    progress: _job.Progress | None = None,
) -> Run:
    """Count what is in streams, in the archive and in queues; write a page, and tables into the lake.

    Args:
        dsn: the database, ``POSTBUS_DSN`` by default.
        lake: a folder or URL: its archive is counted too, and the tables are written there.
        out: the page.
        streams: only these; by default all, also those that only the archive has.
        queues: only these; by default all.
        since: only what was published, finished or given up then or later. A time with a zone, or how long
            ago: ``7d``.
        until: ... and before then.
        bucket: how long a bucket is, ``5m`` for example; by default about a hundred fit.
        session_gap: events of a key that are further apart are of two sessions.
        top: so many types and keys of each stream.
        table: of the archive; by default ``events``, if there is one.
        format: of the archive and of the tables, ``delta`` or ``iceberg``.
        name: of the pipeline.
        master: where Spark runs, if there is no session yet.
        spark: the session to use, by default that of this process.
        progress: called with rows done, rows in all if that is known, and what is being done.

    Returns:
        The record of the run. ``rows`` are events, finished messages and dead letters that were counted.

    Raises:
        NotFound: a stream, a queue or the archive is missing.
        BadArgument: an argument has no meaning.

    Example:
        >>> report(dsn=dsn, lake="/data/lake", out="report.html", since="7d").rows  # doctest: +SKIP
        120400
    """
    _job.need_extra()
    if top < 1:
        raise BadArgument(f"top must be at least 1, not {top}")
    width = None if bucket is None else round(seconds("bucket", bucket))
    if width is not None and width < 1:
        raise BadArgument(f"bucket must be a second or more, not {bucket}")
    gap = seconds("session_gap", session_gap)
    begin, end = moment_of("since", since), moment_of("until", until)
    if begin is not None and end is not None and begin >= end:
        raise BadArgument(f"since ({begin.isoformat()}) is not before until ({end.isoformat()})")
    file = writable(out)
    known = _job.database(dsn)
    server = Server(known)
    try:
        # Not more than one message of each is counted for the listing.
        kept = dict(server.rows("select name, on_ack = 'archive' from postbus.list_queues(1)"))
        chosen = check_queues(list(kept), queues)
        scope = Scope(
            dsn=known,
            streams=tuple(s for s in server.streams() if streams is None or s in streams),
            queues=chosen,
            archiving=frozenset(q for q in chosen if kept[q]),
            named=None if streams is None else tuple(dict.fromkeys(streams)),
            since=begin,
            until=end,
            lake=None if lake is None else _job.lake_path(lake),
            format=format,
        )
        scope = replace(scope, table=archive_table(scope, table))
        check_streams(server, scope)
        options = {
            "lake": scope.lake, "table": scope.table, "format": format, "out": str(file), "bucket": width,
            "session_gap": gap, "since": begin and begin.isoformat(), "until": end and end.isoformat(),
        }  # fmt: skip
        with Recorder(known, name, "report", options, scope.streams) as run:
            from postbus.pipelines._report_tables import open_tables, write_tables

            tables = open_tables(scope, name)  # before the work: they may be another's
            session = _job.session(spark, name, master)
            tell = progress or (lambda done, total, text: None)
            found = _counted(session, scope, tell, bucket=width, gap=gap, top=top)
            tell(found.counted, found.counted, "writing the report")
            write_tables(tables, found, run)
            size = _write(file, _page(found, scope, run, groups(server, scope), gap))
            run.report(
                rows=found.counted,
                bytes=size,
                since={row["stream"]: row["first"].isoformat() for row in found.streams},
                until={row["stream"]: row["last"].isoformat() for row in found.streams},
                total=found.counted,
            )
            return run.finish()
    finally:
        server.close()


def _counted(spark: SparkSession, scope: Scope, tell: _job.Progress, **options: Any) -> Figures:
    tell(0, None, "reading events")

    def watch(read: int) -> None:
        tell(read, None, "counting types, keys, sessions, messages")

    try:
        # Cached: the figures are of the same events, though more of them come meanwhile.
        all_events, all_messages = events(spark, scope).persist(), messages(spark, scope).persist()
        try:
            return count(all_events, all_messages, scope.archiving, watch=watch, **options)
        finally:
            all_events.unpersist()
            all_messages.unpersist()
    except PostbusError:
        raise
    except Exception as exc:
        raise _job.explained(exc) from exc


def _page(found: Figures, scope: Scope, run: Recorder, behind: Rows, gap: float) -> bytes:
    from postbus.pipelines._report_page import About, page

    sources = "the streams" if scope.table is None else f"the streams and the archive {scope.table}"
    about = About(
        run=run.id,
        pipeline=run.pipeline,
        made_at=datetime.now(UTC),
        since=scope.since,
        until=scope.until,
        gap=gap,
        sources=f"{sources}, the queues' archives and the dead letters",
        groups=behind,
    )
    return page(found, about).encode()


def _write(file: Path, text: bytes) -> int:
    """Write the page at once: who looks meanwhile sees the one before."""
    made = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        made.write_bytes(text)
        made.replace(file)
    except OSError as exc:
        raise PostbusError(f"cannot write the page {file}: {exc.strerror}") from exc
    finally:
        made.unlink(missing_ok=True)
    return len(text)


def groups(server: Server, scope: Scope) -> Rows:
    """How far behind the groups of these streams are."""
    columns = ("stream", "group", "pending", "lag", "in_flight", "waiting", "lost")
    query = 'select stream, "group", pending, lag, in_flight, waiting, lost from postbus.list_groups()'
    return [dict(zip(columns, row, strict=True)) for row in server.rows(query) if row[0] in scope.streams]


def archive_table(scope: Scope, asked: str | None) -> str | None:
    """The table of the archive; None where there is none and nobody asked for one."""
    if scope.lake is None:
        if asked is not None:
            raise BadArgument("table is given without a lake", hint="Set lake (--lake) too.")
        return None
    from postbus.lake import open_table

    found = open_table(scope.lake, asked or EVENTS, format=scope.format, dsn=scope.dsn)
    if not found.exists():
        if asked is None:
            return None
        raise NotFound(
            f"there is no {scope.format} table {asked} in lake {scope.lake}",
            hint="Check --lake, --table and --format; or archive first: postbus pipeline archive.",
        )
    missing = {"stream", "id", "type", "key", "at"} - set(found.schema().names)
    if missing:
        raise BadArgument(
            f"lake table {found.name} is not an archive: it has no column {min(missing)!r}",
            hint="Name the table of an archive (--table).",
        )
    return found.name


def writable(out: str | os.PathLike[str]) -> Path:
    """The file of the page, which can be written as far as that can be seen before."""
    file = Path(out).expanduser().absolute()
    if file.is_dir():
        raise BadArgument(f"out is a folder: {file}", hint="Name a file (--out), such as report.html in it.")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as exc:
        raise BadArgument(
            f"cannot write out ({file}): {exc.strerror}", hint="Name a file in a folder of yours (--out)."
        ) from exc
    return file


def seconds(option: str, given: float | str) -> float:
    """A span of time: seconds, or a text such as 30m."""
    found = _SPAN.fullmatch(given.strip()) if isinstance(given, str) else None
    if isinstance(given, str) and found is None:
        raise BadArgument(f"{option} is not a time span: {given!r}", hint="Write 10s, 30m, 12h or 7d.")
    value = float(found[1]) * _SECONDS[found[2]] if found else float(given)
    if not 0 < value <= 100 * 365 * 86400:
        raise BadArgument(f"{option} must be longer than nothing and no more than a century, not {given!r}")
    return value


def moment_of(option: str, given: datetime | str | None) -> datetime | None:
    """A point in time: a time with a zone, or how long ago."""
    if given is None:
        return None
    if isinstance(given, str):
        if _SPAN.fullmatch(given.strip()):
            return datetime.now(UTC) - timedelta(seconds=seconds(option, given))
        try:
            given = datetime.fromisoformat(given.strip())
        except ValueError as exc:
            raise BadArgument(
                f"{option} is not a time: {given!r}",
                hint="Write 2026-01-31T12:00:00+00:00, or 7d for so long ago.",
            ) from exc
    if given.tzinfo is None:
        raise BadArgument(f"{option} has no time zone: {given}", hint="Add one: 2026-01-31T12:00:00+00:00.")
    return given.astimezone(UTC)
