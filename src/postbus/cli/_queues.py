"""``postbus queues``: list, create, alter, drop, purge."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._options import IfNotExists, Options, Queue, options, unless_taken
from postbus.cli._print import done, json_list, table

app = typer.Typer(no_args_is_help=False)

Lease = Annotated[
    str | None,
    typer.Option(help="How long a worker may hold a message: '30 seconds', or seconds.", show_default=False),
]
MaxAttempts = Annotated[
    int | None, typer.Option(help="Deliveries until a message becomes a dead letter.", show_default=False)
]
OnAck = Annotated[
    str | None,
    typer.Option(metavar="[delete|archive]", help="What becomes of finished messages.", show_default=False),
]
MaxSize = Annotated[int | None, typer.Option(help="Refuse messages beyond so many.", show_default=False)]

COLUMNS = {
    "name": "QUEUE",
    "ready": "READY",
    "delayed": "DELAYED",
    "in_flight": "IN FLIGHT",
    "oldest_age": "OLDEST",
    "dead_letters": "DEAD",
    "expired": "EXPIRED",
    "key_policies": "KEY POLICIES",
    "lease": "LEASE",
    "max_attempts": "ATTEMPTS",
    "on_ack": "ON ACK",
    "paused": "PAUSED",
}


@app.callback(invoke_without_command=True)
def queues(ctx: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the queues; create, alter, drop and purge them.

    Example: postbus queues --json
    """
    if ctx.invoked_subcommand is not None:
        return
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_queues()")
    if as_json:
        json_list(found)
    else:
        table(COLUMNS, found, empty="no queues yet: postbus queues create NAME")


@app.command()
def create(
    name: Queue,
    *,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    on_ack: OnAck = None,
    max_size: MaxSize = None,
    option: Options = None,
    if_not_exists: IfNotExists = False,
    dsn: Dsn = None,
) -> None:
    """Create a queue.

    Example: postbus queues create emails --max-attempts 3 --on-ack archive --option backoff='10 seconds'
    """
    given = options(option, lease=lease, max_attempts=max_attempts, on_ack=on_ack, max_size=max_size)
    with connect(dsn) as conn, unless_taken(if_not_exists):
        conn.execute("select postbus.create_queue(%s, %s::jsonb)", (name, given))
        done(f"created queue {name}")


@app.command()
def alter(
    name: Queue,
    *,
    lease: Lease = None,
    max_attempts: MaxAttempts = None,
    on_ack: OnAck = None,
    max_size: MaxSize = None,
    option: Options = None,
    dsn: Dsn = None,
) -> None:
    """Change options of a queue; what is not named stays.

    Example: postbus queues alter emails --lease '2 minutes' --option max_size=null
    """
    given = options(option, lease=lease, max_attempts=max_attempts, on_ack=on_ack, max_size=max_size)
    if given == "{}":
        raise typer.BadParameter(
            "nothing to change: name --lease, --max-attempts, --on-ack, --max-size or --option"
        )
    with connect(dsn) as conn:
        conn.execute("select postbus.alter_queue(%s, %s::jsonb)", (name, given))
    done(f"altered queue {name}")


@app.command()
def drop(
    name: Queue,
    force: Annotated[bool, typer.Option("--force", help="Drop its messages too.")] = False,
    dsn: Dsn = None,
) -> None:
    """Drop a queue with its dead letters. With messages in it, only with --force.

    Example: postbus queues drop emails --force
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.drop_queue(%s, %s)", (name, force))
    done(f"dropped queue {name}")


@app.command()
def purge(
    name: Queue,
    force: Annotated[bool, typer.Option("--force", help="Yes, delete them for good.")] = False,
    dsn: Dsn = None,
) -> None:
    """Delete every message of a queue, also those out with workers. Dead letters and the archive stay.

    Example: postbus queues purge emails --force
    """
    if not force:
        raise typer.BadParameter(
            f"this deletes every message of queue {name}; say --force if that is meant", param_hint="--force"
        )
    with connect(dsn) as conn:
        count = value(conn, "select postbus.purge_queue(%s)", name)
    done(f"purged {count} messages of queue {name}")
