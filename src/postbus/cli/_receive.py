"""``postbus receive`` and ``postbus pop``: take messages from a queue as a worker."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from postbus.cli._connect import Dsn, connect, rows
from postbus.cli._delivery import PAGE, given_back_unless_printed, waits
from postbus.cli._delivery import nack as give_back
from postbus.cli._options import OnlyType, Queue
from postbus.cli._print import message
from postbus.engine import Connection

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Max = Annotated[
    int | None,
    typer.Option(
        min=1, help="Stop after so many messages (default: 1; no limit with --follow).", show_default=False
    ),
]


def receive(
    queue: Queue,
    *,
    max: Max = None,
    lease: Annotated[
        str | None, typer.Option(help="How long to hold the messages: '1 minute'.", show_default=False)
    ] = None,
    type: OnlyType = None,
    worker: Annotated[str | None, typer.Option(help="A name to be seen by.", show_default=False)] = None,
    ack: Annotated[bool, typer.Option("--ack", help="Ack after printing.")] = False,
    nack: Annotated[
        bool, typer.Option("--nack", help="Nack after printing: the messages come again.")
    ] = False,
    reason: Annotated[str | None, typer.Option(help="The reason of the nack.", show_default=False)] = None,
    follow: Follow = False,
    as_json: JsonLines = False,
    dsn: Dsn = None,
) -> None:
    """Take messages as a worker and print them with their receipts, which ack, nack and extend take.

    Messages that could not be printed (Ctrl-C, a closed pipe) go back to the queue at once.

    Example: postbus receive emails --max 10 --lease '5 minutes'

    Example: postbus receive emails --follow --ack --json | jq '.payload | fromjson'
    """
    if ack and nack:
        raise typer.BadParameter("--ack or --nack, not both", param_hint="--nack")
    left = max or (None if follow else 1)
    unfinished: list[str] = []
    with connect(dsn) as conn:
        wait = waits(conn, queue, queue=True) if follow else iter(())
        while left is None or left > 0:
            taken = _take(conn, queue, max=min(left or PAGE, PAGE), lease=lease, worker=worker, type=type)
            if not taken:
                if not follow:
                    break
                next(wait)
                continue
            left = None if left is None else left - len(taken)
            receipts = [row["receipt"] for row in taken]
            with given_back_unless_printed(conn, taken):
                _show(taken, as_json=as_json, finished=ack)
                if ack:
                    conn.execute("select postbus.ack(%s::text[])", (receipts,))
            # Nacked at the end, else a queue without a backoff would hand them out again in this very run.
            unfinished += receipts if nack else []
            if follow:
                give_back(conn, unfinished, reason)
        give_back(conn, unfinished, reason)


def pop(
    queue: Queue,
    *,
    max: Max = None,
    type: OnlyType = None,
    follow: Follow = False,
    as_json: JsonLines = False,
    dsn: Dsn = None,
) -> None:
    """Take messages and finish them before they are printed: at most once.

    What is not printed after that (Ctrl-C, a closed pipe) is lost; see `postbus receive --ack`.

    Example: postbus pop metrics --max 100 --json
    """
    left = max or (None if follow else 1)
    with connect(dsn) as conn:
        wait = waits(conn, queue, queue=True) if follow else iter(())
        while left is None or left > 0:
            query = "select * from postbus.pop(%s, %s, %s)"
            taken = rows(conn, query, queue, min(left or PAGE, PAGE), type)
            if not taken:
                if not follow:
                    break
                next(wait)
                continue
            left = None if left is None else left - len(taken)
            _show(taken, as_json=as_json, finished=True)


def _take(
    conn: Connection, queue: str, *, max: int, lease: str | None, worker: str | None, type: str | None
) -> list[dict[str, Any]]:
    return rows(
        conn,
        "select * from postbus.receive(%s, max => %s, lease => %s::interval, worker => %s, type => %s)",
        *(queue, max, lease, worker or f"postbus cli {conn.info.backend_pid}", type),
    )


def _show(taken: list[dict[str, Any]], *, as_json: bool, finished: bool) -> None:
    for row in taken:
        # A receipt begins with the id; what is finished has none that is worth printing.
        message(row, as_json=as_json, name="id" if finished else "receipt")
    sys.stdout.flush()
