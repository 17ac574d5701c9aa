"""``postbus ack``, ``nack``, ``extend``, ``dead-letter``: by receipt, of queues and streams alike."""

from __future__ import annotations

from typing import Annotated

import typer

from postbus.cli._connect import Dsn, connect, value
from postbus.cli._print import done, short

Receipts = Annotated[
    list[str], typer.Argument(help="Receipts as receive or consume printed them.", show_default=False)
]
Reason = Annotated[str | None, typer.Option(help="Why; kept with the message.", show_default=False)]
State = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="What the next attempt finds; queues only.", show_default=False),
]


def ack(receipts: Receipts, dsn: Dsn = None) -> None:
    """Finish messages for good.

    Example: postbus ack RECEIPT1 RECEIPT2
    """
    with connect(dsn) as conn:
        count = value(conn, "select postbus.ack(%s::text[])", receipts)
    done(f"acked {count}")


def nack(
    receipts: Receipts,
    *,
    delay: Annotated[
        str | None,
        typer.Option(help="Try again after this; default: the backoff.", show_default=False),
    ] = None,
    reason: Reason = None,
    state: State = None,
    dsn: Dsn = None,
) -> None:
    """Give messages back: they come again, or become dead letters after their last attempt.

    Example: postbus nack RECEIPT --delay '5 minutes' --reason 'mail server is down' --state '{"page": 3}'
    """
    with connect(dsn) as conn:
        query = "select postbus.nack(%s::text[], %s::interval, %s, %s::jsonb)"
        count = value(conn, query, receipts, delay, reason, state)
    done(f"nacked {count}")


def extend(
    receipts: Receipts,
    *,
    lease: Annotated[
        str | None,
        typer.Option(
            help="At least so long from now; default: the lease of queue or group.", show_default=False
        ),
    ] = None,
    state: State = None,
    dsn: Dsn = None,
) -> None:
    """Hold messages for longer; print when the first of their leases ends.

    Example: postbus extend RECEIPT --lease '10 minutes'
    """
    with connect(dsn) as conn:
        until = value(
            conn, "select postbus.extend(%s::text[], %s::interval, %s::jsonb)", receipts, lease, state
        )
    done(f"held until {short(until)}")


def dead_letter(receipts: Receipts, *, reason: Reason = None, dsn: Dsn = None) -> None:
    """Give messages up at once, whatever their attempts.

    Example: postbus dead-letter RECEIPT --reason 'unknown currency'
    """
    with connect(dsn) as conn:
        count = value(conn, "select postbus.dead_letter(%s::text[], %s)", receipts, reason)
    done(f"gave up {count}")
