"""``postbus pipeline report``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from postbus.cli import _pipeline_run as common
from postbus.cli._connect import Dsn
from postbus.cli._pipeline_run import Format, Master


def report(
    stream: Annotated[
        list[str] | None,
        typer.Argument(help="Names of streams; all of them by default.", show_default=False),
    ] = None,
    *,
    lake: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL of the lake: its archive counts too, and the tables go there.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[str, typer.Option("--out", help="The page.")] = "report.html",
    queue: Annotated[
        list[str] | None,
        typer.Option(help="Only this queue; may be repeated. All by default.", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only from then on: a time, or 7d for so long ago.", show_default=False),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Only before then.", show_default=False)] = None,
    bucket: Annotated[
        str | None, typer.Option(help="How long a bucket is: 10s, 5m, 1h, 1d.", show_default=False)
    ] = None,
    session_gap: Annotated[
        str, typer.Option("--session-gap", help="Events of a key further apart are of two sessions.")
    ] = "30m",
    top: Annotated[int, typer.Option(min=1, help="So many types and keys of each stream.")] = 20,
    table: Annotated[
        str | None,
        typer.Option("--table", help="Table of the archive; events if there is one.", show_default=False),
    ] = None,
    format: Format = "delta",
    name: Annotated[str, typer.Option("--name", help="Name of the pipeline.")] = "report",
    master: Master = None,
    dsn: Dsn = None,
    as_json: common.Json = False,
) -> None:
    """Write a page about throughput, latency, errors, types, keys and sessions; with --lake also tables.

    Example: postbus pipeline report --lake ./lake --out report.html --since 7d
    """

    def job(dsn: str, show: common.Show) -> Any:
        from postbus.pipelines import report

        return report(
            dsn=dsn, lake=lake, out=out, streams=stream or None, queues=queue or None, since=since,
            until=until, bucket=bucket, session_gap=session_gap, top=top, table=table, format=format,
            name=name, master=master, progress=show,
        )  # fmt: skip

    common.run(dsn, f"report to {out}", as_json, job)
