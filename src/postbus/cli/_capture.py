"""Change capture: capture, uncapture, captures, backfill."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._options import Stream
from postbus.cli._print import done, json_list, notes
from postbus.cli._print import table as print_table
from postbus.engine import Connection

Table = Annotated[str, typer.Argument(help="The table, with its schema where needed.", show_default=False)]
OneStream = Annotated[
    str | None, typer.Argument(help="The stream, where the table has several.", show_default=False)
]
Batch = Annotated[int, typer.Option(min=1, help="Rows per transaction.")]

COLUMNS = {
    "table": "TABLE",
    "stream": "STREAM",
    "key": "KEY",
    "columns": "COLUMNS",
    "exclude": "EXCLUDE",
    "partitions": "PARTITIONS",
    "backfill_done": "BACKFILLED",
    "backfill_finished": "FINISHED",
}
# Rows that open transactions hold are left for later; look again after so long.
_HELD_SECONDS = 0.5


def capture(
    table: Table,
    stream: Stream,
    *,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Only this column and the key; may be repeated.", show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="All columns but this one; may be repeated.", show_default=False),
    ] = None,
    with_backfill: Annotated[
        bool, typer.Option("--backfill", help="Publish the rows that are there as well.")
    ] = False,
    batch: Batch = 5000,
    dsn: Dsn = None,
) -> None:
    """Publish every change of a table to a stream from now on.

    Example: postbus capture public.orders changes --exclude card_number --backfill
    """
    with connect(dsn) as conn:
        conn.execute(
            "select postbus.capture(%s::text::regclass, %s, %s::text[], %s::text[])",
            (table, stream, column or None, exclude or None),
        )
        done(f"changes of table {table} go to stream {stream}")
        if with_backfill:
            _backfill(conn, table, stream, batch, restart=False)


def uncapture(table: Table, stream: OneStream = None, dsn: Dsn = None) -> None:
    """End the capture of a table. What was published stays.

    Example: postbus uncapture public.orders
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.uncapture(%s::text::regclass, %s)", (table, stream))
    done(f"changes of table {table} are no longer captured")


def captures(dsn: Dsn = None, as_json: Json = False) -> None:
    """List the captured tables.

    Example: postbus captures --json
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_captures()")
    if as_json:
        json_list(found)
    else:
        print_table(COLUMNS, found, empty="no captured tables: postbus capture TABLE STREAM")


def backfill(
    table: Table,
    stream: OneStream = None,
    *,
    batch: Batch = 5000,
    restart: Annotated[bool, typer.Option("--restart", help="From the beginning.")] = False,
    dsn: Dsn = None,
) -> None:
    """Publish the rows that a captured table has, next to its changes; goes on where it was left.

    Example: postbus backfill public.orders --batch 10000
    """
    with connect(dsn) as conn:
        _backfill(conn, table, stream, batch, restart=restart)


def _backfill(conn: Connection, table: str, stream: str | None, batch: int, *, restart: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=notes(), transient=True) as progress:
        task = progress.add_task(f"backfill of {table}", total=None)
        while True:
            step = _one_step(conn, table, stream, batch, restart)
            restart = False
            progress.update(task, completed=step["done"], total=max(step["total"] or 0, step["done"]) or None)
            if step["finished"]:
                break
            if not step["rows"]:
                time.sleep(_HELD_SECONDS)
    done(f"backfilled {step['done']} rows of table {table}")


def _one_step(conn: Connection, table: str, stream: str | None, batch: int, restart: bool) -> dict[str, Any]:
    query = "select * from postbus.backfill(%s::text::regclass, %s, %s, %s)"
    return rows(conn, query, table, stream, batch, restart)[0]
