"""``postbus groups``: list, create, alter, drop; and seek, pause, resume."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._options import Group, IfNotExists, Name, OnlyGroup, Options, Stream, options, unless_taken
from postbus.cli._print import done, json_list, table

app = typer.Typer(no_args_is_help=False)

MaxAttempts = Annotated[
    int | None, typer.Option(help="Tries until a message becomes a dead letter.", show_default=False)
]
Lease = Annotated[
    str | None,
    typer.Option(help="How long a worker may hold messages: '30 seconds', or seconds.", show_default=False),
]

COLUMNS = {
    "stream": "STREAM",
    "group": "GROUP",
    "ordering": "ORDERING",
    "pending": "PENDING",
    "lag": "LAG",
    "in_flight": "IN FLIGHT",
    "waiting": "WAITING",
    "dead_letters": "DEAD",
    "expired": "EXPIRED",
    "paused": "PAUSED",
    "lost": "LOST",
}


@app.callback(invoke_without_command=True)
def groups(
    ctx: typer.Context,
    stream: Annotated[str | None, typer.Option(help="Only of this stream.", show_default=False)] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List the consumer groups; create, alter and drop them.

    Example: postbus groups --stream orders
    """
    if ctx.invoked_subcommand is not None:
        return
    with connect(dsn) as conn:
        found = rows(
            conn, "select * from postbus.list_groups() where %s::text is null or stream = %s", stream, stream
        )
    if as_json:
        json_list(found)
    else:
        table(COLUMNS, found, empty="no groups yet: postbus groups create STREAM GROUP")


@app.command()
def create(
    stream: Stream,
    group: Group,
    *,
    ordering: Annotated[
        str | None, typer.Option(help="key (default), stream or none.", show_default=False)
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="latest (default), earliest, or any position of seek.", show_default=False),
    ] = None,
    max_attempts: MaxAttempts = None,
    lease: Lease = None,
    option: Options = None,
    if_not_exists: IfNotExists = False,
    dsn: Dsn = None,
) -> None:
    """Create a consumer group.

    Example: postbus groups create orders billing --ordering key --start earliest --max-attempts 5
    """
    given = options(option, ordering=ordering, start=start, max_attempts=max_attempts, lease=lease)
    with connect(dsn) as conn, unless_taken(if_not_exists):
        conn.execute("select postbus.create_group(%s, %s, %s::jsonb)", (stream, group, given))
        done(f"created group {group} of stream {stream}")


@app.command()
def alter(
    stream: Stream,
    group: Group,
    *,
    max_attempts: MaxAttempts = None,
    lease: Lease = None,
    option: Options = None,
    dsn: Dsn = None,
) -> None:
    """Change options of a group; what is not named stays.

    Example: postbus groups alter orders billing --lease '2 minutes' --option backoff='5 seconds'
    """
    given = options(option, max_attempts=max_attempts, lease=lease)
    if given == "{}":
        raise typer.BadParameter("nothing to change: name --max-attempts, --lease or --option")
    with connect(dsn) as conn:
        conn.execute("select postbus.alter_group(%s, %s, %s::jsonb)", (stream, group, given))
    done(f"altered group {group} of stream {stream}")


@app.command()
def drop(stream: Stream, group: Group, dsn: Dsn = None) -> None:
    """Drop a group with its position and its dead letters. The events stay.

    Example: postbus groups drop orders billing
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.drop_group(%s, %s)", (stream, group))
    done(f"dropped group {group} of stream {stream}")


def seek(
    stream: Stream,
    group: Group,
    position: Annotated[
        str, typer.Argument(help="earliest, latest, tick:N, id:N or a timestamp.", show_default=False)
    ],
    dsn: Dsn = None,
) -> None:
    """Move a group to another position: replay, or skip.

    Example: postbus seek orders billing '2026-01-31 12:00:00+00'
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.seek(%s, %s, %s::text)", (stream, group, position))
    done(f"group {group} of stream {stream} reads from {position}")


def pause(name: Name, group: OnlyGroup = None, dsn: Dsn = None) -> None:
    """Hand out nothing new: of a queue, to all groups of a stream or to one. Publishing and sending go on.

    Example: postbus pause orders --group billing
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.pause(%s, %s)", (name, group))
    done(f"paused {_what(name, group)}")


def resume(name: Name, group: OnlyGroup = None, dsn: Dsn = None) -> None:
    """Undo pause.

    Example: postbus resume orders --group billing
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.resume(%s, %s)", (name, group))
    done(f"resumed {_what(name, group)}")


def _what(name: str, group: str | None) -> str:
    return name if group is None else f"group {group} of stream {name}"
