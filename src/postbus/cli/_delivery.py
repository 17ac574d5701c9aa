"""What consume and receive share: waiting for news, and giving back what nobody saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import sql

from postbus.cli._connect import another, value
from postbus.engine import Connection

# Messages in one call.
PAGE = 1000
# Wake-ups may be lost (a connection pooler, a rolled back publish): look at least this often.
_POLL_SECONDS = 1.0


def waits(conn: Connection, name: str, *, queue: bool = False) -> Iterator[None]:
    """Each step waits until the stream or queue has news, or for a while."""
    conn.execute(sql.SQL("listen {}").format(sql.Identifier(f"postbus.{name}")))
    while True:
        yield
        seconds = _POLL_SECONDS
        if queue:
            # Nobody is told when a delayed message comes due.
            due = value(
                conn, "select extract(epoch from postbus.next_due(%s) - postbus.now_())::float8", name
            )
            if due is not None and 0 < due < seconds:
                seconds = due
        for _ in conn.notifies(timeout=seconds, stop_after=1):
            pass


def nack(conn: Connection, receipts: list[str], reason: str | None) -> None:
    """Give messages back, and forget their receipts."""
    if receipts:
        conn.execute("select postbus.nack(%s::text[], reason => %s)", (receipts, reason))
        receipts.clear()


@contextmanager
def given_back_unless_printed(conn: Connection, taken: list[dict[str, Any]]) -> Iterator[None]:
    """Print messages; those that a signal or a closed pipe kept from being read go back at once."""
    try:
        yield
    except (OSError, KeyboardInterrupt):
        # Not so where the signal came after the ack.
        with suppress(psycopg.Error), another(conn) as fresh:
            receipts = [row["receipt"] for row in taken]
            fresh.execute("select postbus.nack(%s::text[], interval '0', 'not printed')", (receipts,))
        raise
