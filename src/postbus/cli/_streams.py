"""``postbus streams``: list, create, alter, drop."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._options import IfNotExists, Options, Stream, options, unless_taken
from postbus.cli._print import done, json_list, table

app = typer.Typer(no_args_is_help=False)

Lanes = Annotated[
    int | None, typer.Option(help="How many workers of one group can read side by side.", show_default=False)
]
Retain = Annotated[
    str | None,
    typer.Option(help="How long consumed events stay for replay: '1 day', or seconds.", show_default=False),
]

COLUMNS = {
    "name": "STREAM",
    "lanes": "LANES",
    "groups": "GROUPS",
    "events": "EVENTS",
    "size_bytes": "BYTES",
    "retain": "RETAIN",
    "scheduled": "SCHEDULED",
    "dead_letters": "DEAD",
    "paused": "PAUSED",
    "last_tick_at": "LAST TICK",
}


@app.callback(invoke_without_command=True)
def streams(ctx: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the streams; create, alter and drop them.

    Example: postbus streams --json
    """
    if ctx.invoked_subcommand is not None:
        return
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_streams()")
    if as_json:
        json_list(found)
    else:
        table(COLUMNS, found, empty="no streams yet: postbus streams create NAME")


@app.command()
def create(
    name: Stream,
    *,
    lanes: Lanes = None,
    retain: Retain = None,
    option: Options = None,
    if_not_exists: IfNotExists = False,
    dsn: Dsn = None,
) -> None:
    """Create a stream.

    Example: postbus streams create orders --lanes 8 --retain '1 day' --option dedupe_window='10 minutes'
    """
    given = options(option, lanes=lanes, retain=retain)
    with connect(dsn) as conn, unless_taken(if_not_exists):
        conn.execute("select postbus.create_stream(%s, %s::jsonb)", (name, given))
        done(f"created stream {name}")


@app.command()
def alter(
    name: Stream, lanes: Lanes = None, retain: Retain = None, option: Options = None, dsn: Dsn = None
) -> None:
    """Change options of a stream; what is not named stays.

    Example: postbus streams alter orders --lanes 16 --option event_ttl='2 hours'
    """
    given = options(option, lanes=lanes, retain=retain)
    if given == "{}":
        raise typer.BadParameter("nothing to change: name --lanes, --retain or --option")
    with connect(dsn) as conn:
        conn.execute("select postbus.alter_stream(%s, %s::jsonb)", (name, given))
    done(f"altered stream {name}")


@app.command()
def drop(
    name: Stream,
    force: Annotated[bool, typer.Option("--force", help="Drop its groups too.")] = False,
    dsn: Dsn = None,
) -> None:
    """Drop a stream with its events. With groups on it, only with --force.

    Example: postbus streams drop orders --force
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.drop_stream(%s, %s)", (name, force))
    done(f"dropped stream {name}")
