"""``postbus publish``: one event, or one per line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from postbus.cli._connect import Dsn, connect, value
from postbus.cli._input import batches, body, source
from postbus.cli._options import Headers, Stream, headers
from postbus.cli._print import done
from postbus.engine import Connection


def publish(
    stream: Stream,
    payload: Annotated[
        str | None,
        typer.Argument(help="The payload; '-' or nothing reads it from stdin.", show_default=False),
    ] = None,
    *,
    type: Annotated[str, typer.Option("--type", "-t", help="What kind of event it is.")] = "default",
    key: Annotated[
        str | None,
        typer.Option("--key", "-k", help="Events of one key keep their order.", show_default=False),
    ] = None,
    header: Headers = None,
    deliver_at: Annotated[
        str | None, typer.Option(help="Not before this timestamp.", show_default=False)
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(help="Not before so long from now: '5 minutes', or seconds.", show_default=False),
    ] = None,
    dedupe_key: Annotated[
        str | None,
        typer.Option(help="Publish once: an event with this key within the window wins.", show_default=False),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Every line of stdin is an event; blank ones are not.")
    ] = False,
    binary: Annotated[bool, typer.Option("--binary", help="Stdin is bytes, not text.")] = False,
    dsn: Dsn = None,
) -> None:
    """Publish an event and print its id, or one event per line of stdin.

    Lines are committed as they come: a slow pipe is published line by line, a file in large batches.

    Example: postbus publish orders '{"id": 1}' --type order.created --key customer-1

    Example: postbus publish orders --lines < orders.jsonl
    """
    if deliver_at is not None and delay is not None:
        raise typer.BadParameter("give --deliver-at or --delay, not both", param_hint="--delay")
    if (lines or binary) and payload not in (None, "-"):
        raise typer.BadParameter(
            "--lines and --binary read stdin; leave the payload out", param_hint="PAYLOAD"
        )
    if lines and (binary or deliver_at or delay or dedupe_key):
        raise typer.BadParameter("--lines goes with --type, --key and --header only", param_hint="--lines")
    given = headers(header)
    read = source(payload)
    if read is not None and lines:
        with connect(dsn) as conn:
            count = _publish_lines(conn, stream, batches(read), type=type, key=key, headers=given)
            done(f"published {count} events")
        return
    content = body(payload, read, binary=binary)
    cast = "bytea" if binary else "text"
    with connect(dsn) as conn:
        new = value(
            conn,
            f"""select postbus.publish(stream => %s, payload => %s::{cast}, type => %s, key => %s,
                headers => %s::jsonb, deliver_at => coalesce(%s::timestamptz, postbus.now_() + %s::interval),
                dedupe_key => %s)""",
            *(stream, content, type, key, given, deliver_at, delay, dedupe_key),
        )
    done(str(new))


def _publish_lines(
    conn: Connection,
    stream: str,
    read: Iterator[list[str]],
    *,
    type: str,
    key: str | None,
    headers: str | None,
) -> int:
    count = 0
    try:
        for batch in read:
            size = len(batch)
            conn.execute(
                "select postbus.publish_batch(%s, %s::text[], %s::text[], %s::text[], %s::jsonb[])",
                (
                    stream,
                    batch,
                    None if type == "default" else [type] * size,
                    None if key is None else [key] * size,
                    None if headers is None else [headers] * size,
                ),
            )
            count += size
    except BaseException:
        if count:
            print(f"postbus: {count} events were published before this", file=sys.stderr)
        raise
    return count
