"""``postbus send`` and ``postbus send-topic``: one message, or one per line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._input import batches, body, source
from postbus.cli._options import Headers, Queue, Type, headers
from postbus.cli._print import done, json_list, table
from postbus.engine import Connection

Payload = Annotated[
    str | None,
    typer.Argument(help="The payload; '-' or nothing reads it from stdin.", show_default=False),
]
File = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Read the payload from this file.", show_default=False),
]
Key = Annotated[
    str | None,
    typer.Option("--key", "-k", help="What it belongs to; see key policies.", show_default=False),
]
Priority = Annotated[int, typer.Option("--priority", "-p", help="0 to 9; 9 is the most urgent.")]
Delay = Annotated[
    str | None,
    typer.Option(help="Not before so long from now: '5 minutes', or seconds.", show_default=False),
]
Binary = Annotated[bool, typer.Option("--binary", help="What is read is bytes, not text.")]


def send(
    queue: Queue,
    payload: Payload = None,
    *,
    type: Type = "default",
    key: Key = None,
    header: Headers = None,
    priority: Priority = 0,
    delay: Delay = None,
    deliver_at: Annotated[
        str | None, typer.Option(help="Not before this timestamp.", show_default=False)
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(help="Worthless if not delivered within this time: '1 hour'.", show_default=False),
    ] = None,
    dedupe_key: Annotated[
        str | None,
        typer.Option(help="Send once: a message with this key within the window wins.", show_default=False),
    ] = None,
    file: File = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Every line that is read is a message; blank ones are not.")
    ] = False,
    binary: Binary = False,
    dsn: Dsn = None,
) -> None:
    """Send a message to a queue and print its id, or one message per line of stdin or a file.

    Lines are committed as they come: a slow pipe is sent line by line, a file in large batches.

    Example: postbus send emails '{"to": "someone@example.com"}' --key tenant-7 --priority 5

    Example: postbus send emails --lines --file emails.jsonl --delay '10 minutes'
    """
    if deliver_at is not None and delay is not None:
        raise typer.BadParameter("give --deliver-at or --delay, not both", param_hint="--delay")
    if lines and (binary or dedupe_key):
        raise typer.BadParameter("--lines does not go with --binary or --dedupe-key", param_hint="--lines")
    read = source(payload, file)
    if (lines or binary) and read is None:
        raise typer.BadParameter(
            "--lines and --binary read stdin or --file; leave the payload out", param_hint="PAYLOAD"
        )
    given = headers(header)
    later = (priority, delay, deliver_at, ttl)
    if read is not None and lines:
        with connect(dsn) as conn:
            done(f"sent {_send_lines(conn, queue, batches(read), (type, key, given), later)} messages")
        return
    content = body(payload, read, binary=binary)
    cast = "bytea" if binary else "text"
    with connect(dsn) as conn:
        new = value(
            conn,
            f"""select postbus.send(queue => %s, payload => %s::{cast}, type => %s, key => %s,
                headers => %s::jsonb, priority => %s, delay => %s::interval, deliver_at => %s::timestamptz,
                ttl => %s::interval, dedupe_key => %s)""",
            *(queue, content, type, key, given, *later, dedupe_key),
        )
    done(str(new))


def _send_lines(
    conn: Connection,
    queue: str,
    read: Iterator[list[str]],
    envelope: tuple[str | None, ...],
    later: tuple[Any, ...],
) -> int:
    count = 0
    try:
        for batch in read:
            same = (None if item is None else [item] * len(batch) for item in envelope)
            conn.execute(
                """select postbus.send_batch(%s, %s::text[], %s::text[], %s::text[], %s::jsonb[],
                    priority => %s, delay => %s::interval, deliver_at => %s::timestamptz, ttl => %s::interval)
                """,
                (queue, batch, *same, *later),
            )
            count += len(batch)
    except BaseException:
        if count:
            print(f"postbus: {count} messages were sent before this", file=sys.stderr)
        raise
    return count


def send_topic(
    topic: Annotated[str, typer.Argument(help="Words separated by dots.", show_default=False)],
    payload: Payload = None,
    *,
    key: Key = None,
    header: Headers = None,
    priority: Priority = 0,
    delay: Delay = None,
    file: File = None,
    binary: Binary = False,
    as_json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Send a message to every queue that is bound to the topic; print each queue and the id there.

    Example: postbus send-topic orders.created '{"id": 1}' --key customer-1
    """
    read = source(payload, file)
    if binary and read is None:
        raise typer.BadParameter(
            "--binary reads stdin or --file; leave the payload out", param_hint="PAYLOAD"
        )
    content = body(payload, read, binary=binary)
    cast = "bytea" if binary else "text"
    with connect(dsn) as conn:
        found = rows(
            conn,
            f"""select * from postbus.send_topic(topic => %s, payload => %s::{cast}, key => %s,
                headers => %s::jsonb, priority => %s, delay => %s::interval)""",  # noqa: S608
            *(topic, content, key, headers(header), priority, delay),
        )
    if as_json:
        json_list(found)
    else:
        table({"queue": "QUEUE", "id": "ID"}, found, empty=f"no queue is bound to topic {topic}")
