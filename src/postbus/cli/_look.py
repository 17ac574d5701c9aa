"""Looking into queues without taking: peek, archived, in-flight; and cancel."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._options import OnlyKey, Queue
from postbus.cli._print import done, json_list, table
from postbus.errors import NotFound

Max = Annotated[int, typer.Option(min=1, help="At most so many.")]
OnlyId = Annotated[int | None, typer.Option("--id", help="Only this message.", show_default=False)]

PEEKED = {
    "id": "ID",
    "state": "STATE",
    "priority": "PRIORITY",
    "type": "TYPE",
    "key": "KEY",
    "due": "DUE",
    "attempt": "ATTEMPTS",
    "worker": "WORKER",
    "reason": "REASON",
    "payload": "PAYLOAD",
}
ARCHIVED = {
    "id": "ID",
    "type": "TYPE",
    "key": "KEY",
    "created_at": "CREATED",
    "finished_at": "FINISHED",
    "attempt": "ATTEMPTS",
    "worker": "WORKER",
    "payload": "PAYLOAD",
}
IN_FLIGHT = {
    "stream": "NAME",
    "group": "GROUP",
    "batch": "RECEIPT",
    "messages": "MESSAGES",
    "worker": "WORKER",
    "taken_at": "TAKEN",
    "expires_at": "EXPIRES",
}


def peek(
    queue: Queue,
    *,
    state: Annotated[
        str | None,
        typer.Option("--state", "-s", help="ready, delayed or in_flight.", show_default=False),
    ] = None,
    max: Max = 10,
    id_: OnlyId = None,
    key: OnlyKey = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Look at the messages of a queue without taking them, the first that is due first.

    Example: postbus peek emails --state delayed --key tenant-7
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.peek(%s, %s, %s, %s, %s)", queue, state, max, id_, key)
    if as_json:
        json_list(found)
    else:
        table(PEEKED, found, empty=f"nothing there in queue {queue}")


def cancel(
    queue: Queue,
    ids: Annotated[list[int], typer.Argument(help="Ids of messages.", show_default=False)],
    dsn: Dsn = None,
) -> None:
    """Take messages out of a queue before anybody works on them.

    Exits with 1 if some of them were not waiting any more.

    Example: postbus cancel emails 17 18
    """
    with connect(dsn) as conn:
        gone = value(conn, "select postbus.cancel(%s, %s::bigint[])", queue, ids)
    done(f"cancelled {len(gone)} of queue {queue}")
    rest = sorted(set(ids) - set(gone))
    if rest:
        raise NotFound(
            f"not cancelled: {', '.join(map(str, rest))}",
            hint="They are out with a worker, finished, or were never there: postbus peek.",
        )


def archived(
    queue: Queue,
    *,
    id_: OnlyId = None,
    key: OnlyKey = None,
    since: Annotated[
        str | None, typer.Option(help="Finished at this time or later.", show_default=False)
    ] = None,
    until: Annotated[str | None, typer.Option(help="Finished before this time.", show_default=False)] = None,
    max: Max = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List finished messages of a queue that archives them, the newest first.

    Example: postbus archived emails --key tenant-7 --since '2026-01-31 12:00:00+00'
    """
    with connect(dsn) as conn:
        found = rows(
            conn,
            "select * from postbus.archived(%s, %s, %s, %s::timestamptz, %s::timestamptz, %s)",
            *(queue, id_, key, since, until, max),
        )
    if as_json:
        json_list(found)
    else:
        table(ARCHIVED, found, empty=f"nothing in the archive of queue {queue}")


def in_flight(
    name: Annotated[
        str | None, typer.Argument(help="Only of this stream or queue.", show_default=False)
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List what is out with workers, with the receipts.

    Example: postbus in-flight emails
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.in_flight(%s)", name)
    if as_json:
        json_list(found)
    else:
        table(IN_FLIGHT, found, empty="nothing is out with a worker")
