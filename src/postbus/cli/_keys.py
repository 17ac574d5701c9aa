"""``postbus keys``: the key policies of queues."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._options import Queue
from postbus.cli._print import done, json_list, table

app = typer.Typer(no_args_is_help=False)

OneKey = Annotated[
    str | None,
    typer.Option(
        "--key", "-k", help="Only for this key (default: every key without its own).", show_default=False
    ),
]

COLUMNS = {
    "queue": "QUEUE",
    "key": "KEY",
    "concurrency": "CONCURRENCY",
    "rate": "RATE",
    "burst": "BURST",
    "max_size": "MAX SIZE",
    "weight": "WEIGHT",
}


@app.callback(invoke_without_command=True)
def keys(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Option(help="Only of this queue.", show_default=False)] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List the key policies of queues; set and unset them.

    Example: postbus keys --queue emails
    """
    if ctx.invoked_subcommand is not None:
        return
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_key_policies(%s)", queue)
    if as_json:
        json_list(found)
    else:
        shown = [row | {"key": "(default)"} if row["key"] is None else row for row in found]
        table(COLUMNS, shown, empty="no key policies: postbus keys set QUEUE --concurrency 1")


@app.command(name="set")
def set_(
    queue: Queue,
    *,
    key: OneKey = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="At most so many at once; 1 is first in, first out.", show_default=False),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="At most so many a second.", show_default=False)] = None,
    burst: Annotated[
        int | None,
        typer.Option(help="So many may come at once (default: those of a second).", show_default=False),
    ] = None,
    max_size: Annotated[
        int | None, typer.Option(help="Refuse messages beyond so many.", show_default=False)
    ] = None,
    weight: Annotated[int, typer.Option(help="How many turns it gets beside others.")] = 1,
    dsn: Dsn = None,
) -> None:
    """Set what a key may use: one key, or every key without a policy of its own. It replaces what was set.

    Example: postbus keys set emails --concurrency 1

    Example: postbus keys set emails --key tenant-7 --concurrency 4 --rate 10 --burst 20
    """
    if concurrency is rate is max_size is burst is None and weight == 1 and key is None:
        raise typer.BadParameter("name a limit: --concurrency, --rate, --max-size or --weight")
    with connect(dsn) as conn:
        conn.execute(
            "select postbus.set_key_policy(%s, %s, %s, %s, %s, %s, %s)",
            (queue, key, concurrency, rate, burst, max_size, weight),
        )
    done(f"set the policy of {_what(key)} of queue {queue}")


@app.command()
def unset(queue: Queue, *, key: OneKey = None, dsn: Dsn = None) -> None:
    """Take a policy away: that of one key, or the default one.

    Example: postbus keys unset emails --key tenant-7
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.unset_key_policy(%s, %s)", (queue, key))
    done(f"unset the policy of {_what(key)} of queue {queue}")


def _what(key: str | None) -> str:
    return "all keys" if key is None else f"key {key}"
