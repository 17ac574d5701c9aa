"""``postbus consume`` and ``postbus tail``: read a stream as a group, or just look on."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import psycopg
import typer

from postbus.cli._connect import Dsn, another, connect, rows
from postbus.cli._delivery import PAGE, given_back_unless_printed, waits
from postbus.cli._delivery import nack as give_back
from postbus.cli._options import Group, Stream
from postbus.cli._print import message
from postbus.engine import Connection
from postbus.errors import NotFound, translated

# One lock per living tail; whoever gets the lock of a tail's group knows that its owner is gone.
_TAIL_LOCK = 1886351987
_TAIL = "tail:"

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line, with receipt and batch.")]


def consume(
    stream: Stream,
    group: Group,
    *,
    max: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop after so many messages (default: 100; no limit with --follow).",
            show_default=False,
        ),
    ] = None,
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Ack after printing, or leave the lease to run.")
    ] = True,
    nack: Annotated[
        bool, typer.Option("--nack", help="Nack after printing: the messages come again.")
    ] = False,
    reason: Annotated[str | None, typer.Option(help="The reason of the nack.", show_default=False)] = None,
    lease: Annotated[
        str | None, typer.Option(help="How long to hold the messages: '1 minute'.", show_default=False)
    ] = None,
    follow: Follow = False,
    as_json: JsonLines = False,
    dsn: Dsn = None,
) -> None:
    """Take messages as a worker of the group, print them and ack them.

    Messages that could not be printed (Ctrl-C, a closed pipe) go back to the group at once.

    Example: postbus consume orders billing --max 10

    Example: postbus consume orders billing --follow --json | jq '.payload | fromjson'
    """
    finish = "nack" if nack else "ack" if ack else None
    left = max or (None if follow else 100)
    unfinished: list[str] = []
    with connect(dsn) as conn:
        wait = waits(conn, stream) if follow else iter(())
        while left is None or left > 0:
            taken = _take(conn, stream, group, min(left or PAGE, PAGE), lease)
            if not taken:
                if not follow:
                    break
                next(wait)
                continue
            left = None if left is None else left - len(taken)
            with given_back_unless_printed(conn, taken):
                for row in taken:
                    message(row, as_json=as_json)
                sys.stdout.flush()
                if finish == "ack":
                    conn.execute("select postbus.ack(%s::text)", (taken[0]["batch"],))
            # Nacked at the end, else a group without a backoff would see them again in this very run.
            unfinished += [row["receipt"] for row in taken] if finish == "nack" else []
            if follow:
                give_back(conn, unfinished, reason)
        give_back(conn, unfinished, reason)


def tail(
    stream: Stream,
    start: Annotated[
        str, typer.Option("--from", help="Where to begin: latest, earliest, or any position of seek.")
    ] = "latest",
    max: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many events.", show_default=False)
    ] = None,
    as_json: JsonLines = False,
    dsn: Dsn = None,
) -> None:
    """Follow a stream without being one of its groups, until Ctrl-C.

    It reads through a group of its own that is dropped at the end. One that was killed leaves its group
    behind, to be dropped by the next `postbus tail` or `postbus maintain`.

    Example: postbus tail orders --json | jq '.payload | fromjson'
    """
    left = max
    with connect(dsn) as conn, _own_group(conn, stream, start) as group:
        wait = waits(conn, stream)
        while left is None or left > 0:
            taken = _take(conn, stream, group, min(left or PAGE, PAGE), None)
            if not taken:
                next(wait)
                continue
            # Acked first: a reader that is slow to look on is no reason to show events twice.
            conn.execute("select postbus.ack(%s::text)", (taken[0]["batch"],))
            left = None if left is None else left - len(taken)
            for row in taken:
                message(row, as_json=as_json)
            sys.stdout.flush()


def dead_tails(conn: Connection) -> list[dict[str, Any]]:
    """The groups of tails that were killed; their locks ended with their sessions."""
    return rows(
        conn,
        """select g.stream, g."group" from postbus.list_groups() g
        where g."group" like %s and not exists (select from pg_locks l where l.locktype = 'advisory'
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
          and l.classid = %s::oid and l.objid = (hashtext(g."group")::bigint & 4294967295)::oid)""",
        *(f"{_TAIL}%", _TAIL_LOCK),
    )


def drop_dead_tails(conn: Connection) -> None:
    """Drop the groups that killed tails left behind."""
    for row in dead_tails(conn):
        with suppress(NotFound), translated():
            conn.execute("select postbus.drop_group(%s, %s)", (row["stream"], row["group"]))


@contextmanager
def _own_group(conn: Connection, stream: str, start: str) -> Iterator[str]:
    drop_dead_tails(conn)
    group = f"{_TAIL}{secrets.token_hex(6)}"
    conn.execute("select pg_advisory_lock(%s, hashtext(%s))", (_TAIL_LOCK, group))
    options = json.dumps({"ordering": "stream", "start": start})
    try:
        conn.execute("select postbus.create_group(%s, %s, %s::jsonb)", (stream, group, options))
        yield group
    finally:
        # The group may be gone with its stream; the server may be gone too, and that is reported already.
        with suppress(NotFound, psycopg.OperationalError), translated(), another(conn) as fresh:
            fresh.execute("select postbus.drop_group(%s, %s)", (stream, group))


def _take(conn: Connection, stream: str, group: str, max: int, lease: str | None) -> list[dict[str, Any]]:
    return rows(
        conn,
        "select * from postbus.consume(%s, %s, max => %s, lease => %s::interval, worker => %s)",
        *(stream, group, max, lease, f"postbus cli {conn.info.backend_pid}"),
    )
