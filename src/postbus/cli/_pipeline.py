"""``postbus pipeline``: archive, mirror, replay and report, each in one command, and what they have done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from postbus.cli import _pipeline_run as common
from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._pipeline_mirror import mirror
from postbus.cli._pipeline_report import report
from postbus.cli._pipeline_run import Every, Follow, Format, Lake, Master, MaxEvents, Name, Table
from postbus.cli._print import done, json_line, json_list, table

app = typer.Typer(no_args_is_help=True)

Pipeline = Annotated[str, typer.Argument(help="Name of the pipeline.", show_default=False)]

STATUS = {
    "pipeline": "PIPELINE",
    "kind": "KIND",
    "state": "STATE",
    "started_at": "LAST RUN",
    "took": "TOOK",
    "rows": "ROWS",
    "total_rows": "ALL ROWS",
    "runs": "RUNS",
    "failures": "FAILED",
    "pending": "PENDING",
    "lag": "LAG",
    "problem": "ERROR",
}
RUNS = {
    "run": "RUN",
    "pipeline": "PIPELINE",
    "kind": "KIND",
    "state": "STATE",
    "started_at": "STARTED",
    "took": "TOOK",
    "rows": "ROWS",
    "bytes": "BYTES",
    "problem": "ERROR",
}


@app.callback()
def pipeline() -> None:
    """Pipelines on Spark: streams and tables to a lake and back. Needs the extra: spark.

    Example: postbus pipeline archive orders --lake ./lake
    """


@app.command()
def status(dsn: Dsn = None, as_json: Json = False) -> None:
    """List the pipelines: the last run of each, all its runs together, and how far behind it is.

    Example: postbus pipeline status
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.pipeline_stats()")
    if as_json:
        json_list(found)
        return
    shown = [_readable(row) | {"problem": _problem(row, row["state"])} for row in found]
    table(STATUS, shown, empty="no pipelines yet: postbus pipeline archive STREAM --lake DIR")


@app.command()
def runs(
    name: Annotated[str | None, typer.Argument(help="Only of this pipeline.", show_default=False)] = None,
    *,
    max: Annotated[int, typer.Option("--max", min=1, help="At most so many.")] = 20,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first.

    Example: postbus pipeline runs events --json
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_runs(%s, %s)", name, max)
    if as_json:
        json_list(found)
        return
    shown = [_readable(row) | {"problem": _problem(row, row["state"])} for row in found]
    table(RUNS, shown, empty="no runs yet")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    lag = row.get("lag_seconds")
    return {
        **row,
        "took": timedelta(seconds=row["seconds"]),
        "lag": None if lag is None else timedelta(seconds=lag),
    }


def _problem(row: dict[str, Any], state: str) -> str | None:
    """The first line will do in a table; --json has all of it."""
    return row["error"].split("\n", 1)[0] if state == "failed" and row["error"] else None


@app.command()
def drop(name: Pipeline, dsn: Dsn = None) -> None:
    """Forget a pipeline and its runs, and drop its group: retention no longer waits for it. Its tables stay.

    Example: postbus pipeline drop events
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.drop_pipeline(%s)", (name,))
    done(f"dropped pipeline {name}")


@app.command()
def archive(
    stream: Annotated[list[str], typer.Argument(help="Names of streams.", show_default=False)],
    *,
    lake: Lake,
    table: Table = "events",
    format: Format = "delta",
    name: Name = None,
    follow: Follow = False,
    every: Every = 10.0,
    max_events: MaxEvents = 1_000_000,
    compact: Annotated[bool, typer.Option("--compact", help="Put small files together at the end.")] = False,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on where events were truncated before they were archived.")
    ] = False,
    master: Master = None,
    dsn: Dsn = None,
    as_json: common.Json = False,
) -> None:
    """Append the events of streams to a table of the lake, exactly once; goes on where the last run ended.

    What is not archived yet is kept by the streams.

    Example: postbus pipeline archive orders refunds --lake ./lake
    """

    def job(dsn: str, show: common.Show) -> Any:
        from postbus.pipelines import archive

        return archive(
            stream, dsn=dsn, lake=lake, table=table, format=format, name=name, follow=follow,
            every=every, max_events=max_events, compact=compact, skip_lost=skip_lost, master=master,
            progress=show,
        )  # fmt: skip

    common.run(dsn, f"archive to {table}", as_json, job)


@app.command()
def replay(
    *,
    lake: Lake,
    table: Table = "events",
    format: Format = "delta",
    to_stream: Annotated[str | None, typer.Option(help="Publish to this stream.", show_default=False)] = None,
    to_queue: Annotated[str | None, typer.Option(help="Send to this queue.", show_default=False)] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(help="Only events of this stream; may be repeated.", show_default=False),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only events published then or later.", show_default=False)
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only events published before then.", show_default=False)
    ] = None,
    type: Annotated[
        list[str] | None,
        typer.Option("--type", "-t", help="Only of this type; may be repeated.", show_default=False),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", "-k", help="Only with this key; may be repeated.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="At most so many events per second.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Events per transaction.")] = 1000,
    name: Name = None,
    master: Master = None,
    dsn: Dsn = None,
    as_json: common.Json = False,
) -> None:
    """Publish archived events again, or send them to a queue, in their order and exactly once.

    A replay that was interrupted goes on where it was when it is run again with its --name.

    Example: postbus pipeline replay --lake ./lake --to-stream orders-again --since 2026-01-31T00:00Z
    """

    def job(dsn: str, show: common.Show) -> Any:
        from postbus.pipelines import replay

        return replay(
            dsn=dsn, lake=lake, table=table, format=format, to_stream=to_stream, to_queue=to_queue,
            streams=stream, since=since, until=until, types=type, keys=key, rate=rate, batch=batch, name=name,
            master=master, progress=show,
        )  # fmt: skip

    common.run(dsn, f"replay of {table}", as_json, job)


@app.command()
def compact(
    *,
    lake: Lake,
    table: Table = "events",
    format: Format = "delta",
    target_mb: Annotated[int, typer.Option("--target-mb", min=1, help="How large files are to be.")] = 128,
    dsn: Dsn = None,
    as_json: common.Json = False,
) -> None:
    """Put the small files of a table of the lake together. Readers and writers go on.

    Example: postbus pipeline compact --lake ./lake --table events
    """
    with _lake_table(lake, table, format, dsn) as found:
        did = found.compact(target_bytes=target_mb * 2**20)
    _told(did, f"compacted {table}", as_json)


@app.command()
def vacuum(
    *,
    lake: Lake,
    table: Table = "events",
    format: Format = "delta",
    older_than: Annotated[
        str, typer.Option("--older-than", help="Keep files that are younger: 7d, 12h.")
    ] = "7d",
    dsn: Dsn = None,
    as_json: common.Json = False,
) -> None:
    """Delete files that a table of the lake no longer needs: replaced ones, and those of failed tasks.

    Example: postbus pipeline vacuum --lake ./lake --older-than 7d
    """
    age = _age(older_than)
    with _lake_table(lake, table, format, dsn) as found:
        did = found.vacuum(older_than=age)
    _told(did, f"vacuumed {table}", as_json)


@contextmanager
def _lake_table(lake: str, table: str, format: str, dsn: str | None) -> Iterator[Any]:
    """A table of the lake; Iceberg has its catalog in the database."""
    from postbus.pipelines._job import lake_path, need_extra

    need_extra()
    from postbus.lake import open_table

    if format == "iceberg":
        with common.target(dsn) as found:
            yield open_table(lake_path(lake), table, format=format, dsn=found)
    else:
        yield open_table(lake_path(lake), table, format=format)


def _told(did: Any, text: str, as_json: bool) -> None:
    if as_json:
        json_line(asdict(did))
    else:
        parts = (f"{name.replace('_', ' ')} {count:,}" for name, count in asdict(did).items())
        done(f"{text}: {', '.join(parts)}")


def _age(text: str) -> timedelta:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a time span such as 7d or 12h", param_hint="--older-than")
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    return timedelta(**{units[found[2]]: float(found[1])})


app.command()(mirror)
app.command()(report)
