"""``postbus pipeline mirror``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from postbus.cli import _pipeline_run as common
from postbus.cli._connect import Dsn
from postbus.cli._pipeline_run import Every, Follow, Format, Lake, Master, MaxEvents, Name


def mirror(
    table: Annotated[
        str, typer.Argument(help="The table, with its schema where needed.", show_default=False)
    ],
    *,
    lake: Lake,
    format: Format = "delta",
    name: Name = None,
    stream: Annotated[
        str | None,
        typer.Option(help="The stream of its changes, where it has several.", show_default=False),
    ] = None,
    capture: Annotated[
        bool, typer.Option("--capture", help="Capture the table to --stream if it is not captured yet.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Keep every version of every row too, in NAME_history.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Begin anew: empty the lake table, publish all rows again.")
    ] = False,
    follow: Follow = False,
    every: Every = 1.0,
    max_events: MaxEvents = 200_000,
    master: Master = None,
    dsn: Dsn = None,
    as_json: common.Json = False,
) -> None:
    """Keep a table of the lake equal to a captured table; goes on where the last run ended.

    The first run publishes the rows that are there. Writers go on meanwhile.

    Example: postbus pipeline mirror shop.orders --lake ./lake
    """

    def job(dsn: str, show: common.Show) -> Any:
        from postbus.pipelines import mirror

        return mirror(
            table, dsn=dsn, lake=lake, format=format, name=name, stream=stream, capture=capture,
            history=history, rebuild=rebuild, follow=follow, every=every, max_events=max_events,
            master=master, progress=show,
        )  # fmt: skip

    common.run(dsn, f"mirror of {table}", as_json, job)
