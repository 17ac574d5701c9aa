"""``postbus maintain``: upkeep, once or for ever."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._consume import drop_dead_tails
from postbus.cli._print import json_line, json_list, notes, table

_SWEEP_SECONDS = 60.0
COLUMNS = {"object": "OBJECT", "step": "STEP", "done": "DONE", "problem": "PROBLEM"}


def maintain(
    every: Annotated[
        float | None,
        typer.Option(
            min=0.05, metavar="SECONDS", help="Go on, with so long a pause in between.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Run the upkeep: rotation, retention, counting, pruning, expiry, scheduled events, schedules.

    Any number of these may run at the same time. Exits with 1 if a step failed.

    Example: postbus maintain --every 1
    """
    with connect(dsn) as conn:
        drop_dead_tails(conn)
        swept = time.monotonic()
        while True:
            found = rows(conn, "select * from postbus.maintain()")
            if every is None:
                break
            for row in found:
                if as_json:
                    json_line(row)
                elif row["problem"]:
                    notes().print(f"{row['object']}: {row['problem']}", markup=False, soft_wrap=True)
            sys.stdout.flush()
            time.sleep(every)
            if time.monotonic() > swept + _SWEEP_SECONDS:
                drop_dead_tails(conn)
                swept = time.monotonic()
    if as_json:
        json_list(found)
    else:
        table(COLUMNS, found, empty="nothing to do")
    if any(row["problem"] for row in found):
        raise typer.Exit(1)
