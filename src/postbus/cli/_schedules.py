"""Schedules: schedule, unschedule, and ``postbus schedules`` to list, pause and resume them."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._options import Headers, Type, headers
from postbus.cli._print import done, json_list, short, table

app = typer.Typer(no_args_is_help=False)

Name = Annotated[str, typer.Argument(help="Name of the schedule.", show_default=False)]

COLUMNS = {
    "name": "SCHEDULE",
    "cron": "CRON",
    "timezone": "TIME ZONE",
    "target": "TARGET",
    "missed": "MISSED",
    "paused": "PAUSED",
    "last_at": "LAST",
    "next_at": "NEXT",
    "problem": "PROBLEM",
}


@app.callback(invoke_without_command=True)
def schedules(ctx: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the schedules; pause and resume them.

    Example: postbus schedules --json
    """
    if ctx.invoked_subcommand is not None:
        return
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_schedules()")
    if as_json:
        json_list(found)
    else:
        table(COLUMNS, found, empty="no schedules yet: postbus schedule NAME CRON TARGET")


@app.command()
def pause(name: Name, dsn: Dsn = None) -> None:
    """Fire nothing until it is resumed.

    Example: postbus schedules pause daily
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.pause_schedule(%s)", (name,))
    done(f"paused schedule {name}")


@app.command()
def resume(name: Name, dsn: Dsn = None) -> None:
    """Go on with the next slot from now; what passed meanwhile never fires.

    Example: postbus schedules resume daily
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.resume_schedule(%s)", (name,))
    done(f"resumed schedule {name}")


def schedule(
    name: Name,
    cron: Annotated[
        str,
        typer.Argument(help="Minute, hour, day, month, weekday: '30 9 * * mon-fri'.", show_default=False),
    ],
    target: Annotated[str, typer.Argument(help="The queue or stream to send to.", show_default=False)],
    payload: Annotated[str, typer.Argument(help="The payload of every message.")] = "{}",
    *,
    timezone: Annotated[str, typer.Option(help="Whose clock: Europe/Zurich.")] = "UTC",
    type: Type = "default",
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="The key of every message.", show_default=False)
    ] = None,
    header: Headers = None,
    missed: Annotated[
        str, typer.Option(metavar="[once|all|skip]", help="What becomes of slots that were missed.")
    ] = "once",
    dsn: Dsn = None,
) -> None:
    """Send a message by the clock, or change the schedule of that name. `postbus maintain` fires it.

    Example: postbus schedule daily '0 9 * * mon-fri' reports '{"kind": "daily"}' --timezone Europe/Zurich
    """
    with connect(dsn) as conn:
        conn.execute(
            """select postbus.schedule(name => %s, cron => %s, target => %s, payload => %s::text,
                timezone => %s, type => %s, key => %s, headers => %s::jsonb, missed => %s)""",
            (name, cron, target, payload, timezone, type, key, headers(header), missed),
        )
        when = value(conn, "select next_at from postbus.list_schedules() where name = %s", name)
    done(f"schedule {name} is paused" if when is None else f"schedule {name} fires next at {short(when)}")


def unschedule(name: Name, dsn: Dsn = None) -> None:
    """Remove a schedule. What it sent stays.

    Example: postbus unschedule daily
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.unschedule(%s)", (name,))
    done(f"removed schedule {name}")
