"""``postbus demo``: see the bus at work, on a PostgreSQL of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import typer
from psycopg import sql
from psycopg.conninfo import make_conninfo
from rich.text import Text

from postbus import demo as play
from postbus.cli._connect import Dsn, chosen, with_defaults
from postbus.cli._print import console, notes, table
from postbus.embedded import Server
from postbus.errors import translated


def demo(dsn: Dsn = None) -> None:
    """Publish, consume, fail, redeliver, capture: in a database of its own that is gone afterwards.

    Without a DSN it starts a PostgreSQL in a temporary directory; on a server it makes and drops a database.

    Example: postbus demo
    """
    with notes().status("starting PostgreSQL") as spinner, translated(), _own_database(dsn) as target:
        with psycopg.connect(with_defaults(target), autocommit=True) as conn:
            where = conn.execute("select current_setting('server_version')").fetchone()
            result = play.run(conn, spinner.update)
        spinner.update("stopping")
    out = console()
    facts = {
        "transactions": play.TRANSACTIONS,
        "rolled back": result.rolled_back,
        "events published": result.published,
        "delivered to billing (order per customer)": result.delivered["billing"],
        "  of these delivered again after a nack": result.redelivered["billing"],
        "  dead letters, redriven": f"{result.dead_letters}, {result.redriven}",
        "delivered to analytics (one order for all)": result.delivered["analytics"],
        "changes of the table captured": result.delivered["mirror"],
        "e-mails sent from the queue (one at a time per customer)": result.delivered["emails"],
        "time": f"{result.seconds:.1f} s",
    }
    rows = [{"what": what, "count": str(count)} for what, count in facts.items()]
    version = where[0] if where else "?"
    table({"what": "", "count": ""}, rows, title=f"Postbus on PostgreSQL {version}", empty="")
    out.print()
    for name, held in result.checks:
        mark = Text("ok     ", style="green") if held else Text("WRONG  ", style="bold red")
        out.print(mark + Text(name))
    if result.wrong:
        raise typer.Exit(1)


@contextmanager
def _own_database(dsn: str | None) -> Iterator[str]:
    server = chosen(dsn)
    if server is None:
        with Server.temporary() as embedded:
            yield embedded.dsn
        return
    name = sql.Identifier(f"postbus_demo_{secrets.token_hex(4)}")
    with psycopg.connect(with_defaults(server), autocommit=True) as conn:
        conn.execute(sql.SQL("create database {} template template0").format(name))
        try:
            yield make_conninfo(server, dbname=name.as_string(None).strip('"'))
        finally:
            conn.execute(sql.SQL("drop database {} with (force)").format(name))
