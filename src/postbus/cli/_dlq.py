"""``postbus dlq``: the dead letters of a stream or a queue."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._options import Name, OnlyGroup
from postbus.cli._print import done, json_list, table

app = typer.Typer(no_args_is_help=True, help="Look at dead letters, send them back, purge them.")

COLUMNS = {
    "id": "ID",
    "group_name": "GROUP",
    "event_id": "EVENT",
    "type": "TYPE",
    "key": "KEY",
    "attempt": "ATTEMPTS",
    "reason": "REASON",
    "died_at": "DIED",
    "payload": "PAYLOAD",
}
QUEUE_COLUMNS = {k: v for k, v in COLUMNS.items() if k != "group_name"} | {"event_id": "MESSAGE"}


@app.command(name="list")
def list_(
    name: Name,
    *,
    group: OnlyGroup = None,
    max: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    after: Annotated[int, typer.Option(help="Only those with a larger id: the next page.")] = 0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List dead letters, the oldest first.

    Example: postbus dlq list orders --group billing
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.dead_letters(%s, %s, %s, %s)", name, group, max, after)
    if as_json:
        json_list(found)
    else:
        queue = found and found[0]["group_name"] is None
        table(QUEUE_COLUMNS if queue else COLUMNS, found, empty=f"no dead letters in {name}")


@app.command()
def redrive(
    name: Name,
    ids: Annotated[list[int] | None, typer.Argument(help="Which ones.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    group: OnlyGroup = None,
    dsn: Dsn = None,
) -> None:
    """Send dead letters back to the group or queue that gave them up, to be tried afresh.

    Example: postbus dlq redrive orders 17 18
    """
    if bool(ids) == all_:
        raise typer.BadParameter("name the ids, or say --all", param_hint="IDS")
    with connect(dsn) as conn:
        count = value(conn, "select postbus.redrive(%s, %s::bigint[], %s)", name, ids or None, group)
    done(f"redrove {count} of {name}")


@app.command()
def purge(
    name: Name,
    older_than: Annotated[str, typer.Option(help="Only those that died longer ago than this.")] = "30 days",
    group: OnlyGroup = None,
    dsn: Dsn = None,
) -> None:
    """Delete old dead letters for good.

    Example: postbus dlq purge orders --older-than '7 days'
    """
    with connect(dsn) as conn:
        count = value(
            conn, "select postbus.purge_dead_letters(%s, %s::interval, %s)", name, older_than, group
        )
    done(f"purged {count} of {name}")
