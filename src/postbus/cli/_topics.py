"""Topics: bind, unbind, bindings."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, Json, connect, rows
from postbus.cli._options import Queue
from postbus.cli._print import done, json_list, table

Pattern = Annotated[
    str, typer.Argument(help="Words with dots; * is one word, # any number of them: orders.*, #.failed.")
]
FromStream = Annotated[
    str | None,
    typer.Option(
        "--stream", help="Copy events of this stream; the pattern is about their type.", show_default=False
    ),
]

COLUMNS = {"queue": "QUEUE", "stream": "STREAM", "pattern": "PATTERN"}


def bind(queue: Queue, pattern: Pattern = "#", stream: FromStream = None, dsn: Dsn = None) -> None:
    """Let a queue get what is sent to topics that fit, or the events of a stream whose type fits.

    Example: postbus bind emails 'orders.*'

    Example: postbus bind emails order.created --stream orders
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.bind(%s, %s, %s)", (queue, pattern, stream))
    done(f"bound queue {queue} to {_what(pattern, stream)}")


def unbind(queue: Queue, pattern: Pattern = "#", stream: FromStream = None, dsn: Dsn = None) -> None:
    """Undo bind. What is in the queue stays.

    Example: postbus unbind emails 'orders.*'
    """
    with connect(dsn) as conn:
        conn.execute("select postbus.unbind(%s, %s, %s)", (queue, pattern, stream))
    done(f"unbound queue {queue} from {_what(pattern, stream)}")


def bindings(dsn: Dsn = None, as_json: Json = False) -> None:
    """List which queues get what.

    Example: postbus bindings --json
    """
    with connect(dsn) as conn:
        found = rows(conn, "select * from postbus.list_bindings()")
    if as_json:
        json_list(found)
    else:
        table(COLUMNS, found, empty="no bindings: postbus bind QUEUE PATTERN")


def _what(pattern: str, stream: str | None) -> str:
    return f"topics {pattern}" if stream is None else f"types {pattern} of stream {stream}"
