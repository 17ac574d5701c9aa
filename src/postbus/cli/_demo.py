"""``postbus demo``: see the bus at work, on a PostgreSQL of its own."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from psycopg import sql
from psycopg.conninfo import make_conninfo
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from postbus import demo as play
from postbus.cli._connect import Dsn, chosen, with_defaults
from postbus.cli._pipeline_run import amount, bar
from postbus.cli._print import console, notes, table
from postbus.demo import _lake
from postbus.demo import _shop as shop
from postbus.embedded import Server
from postbus.errors import translated

Report = Annotated[
    Path, typer.Option("--report", help="Where the page with plots is written, at the end.", dir_okay=False)
]


def demo(
    dsn: Dsn = None,
    report: Report = Path("postbus-report.html"),
    lake: Annotated[bool, typer.Option(help="End with the pipeline: archive, mirror, report.")] = True,
) -> None:
    """Orders, workers, a crash, a dead letter, a lake: in a database of its own that is gone afterwards.

    Without a DSN it starts a PostgreSQL in a temporary directory; on a server it makes and drops a database.
    The lake is a temporary directory too; it needs the extra spark.

    Example: postbus demo
    """
    lacking = _lake.missing() if lake else []
    found: _lake.Lake | None = None
    with translated(), _own_database(dsn) as target:
        own = with_defaults(target)
        with psycopg.connect(own, autocommit=True) as conn:
            row = conn.execute("select current_setting('server_version')").fetchone()
            with _bars() as watch:
                result = play.run(own, watch)
            if lake and not lacking:
                with tempfile.TemporaryDirectory(prefix="postbus-lake-") as folder, bar("lake") as show:
                    found = _lake.run(conn, own, Path(folder), report.absolute(), show)
    if found is not None:
        result.checks += found.checks
        result.seconds += found.seconds
    facts = {
        "transactions": f"{result.committed + result.rolled_back:,}",
        "  of these rolled back": f"{result.rolled_back:,}",
        "events published": f"{result.published:,}",
        "changes of the table captured": f"{result.changes:,}",
        "e-mails sent": f"{result.mails:,}",
        "messages handled by workers": f"{result.handled:,}",
        "  of these delivered again": f"{result.again:,}",
        "in the hands of the worker that was killed": f"{result.taken_over:,}",
        "  seconds until others had them": f"{result.recovery:.1f}",
        "dead letters, redriven": f"{result.dead_letters}, {result.redriven}",
        "from commit to bill, median": f"{result.latency * 1000:,.0f} ms",
        **({} if found is None else _facts(found)),
        "time in all": f"{result.seconds:.1f} s",
    }
    rows = [{"what": what, "count": count} for what, count in facts.items()]
    table({"what": "", "count": ""}, rows, title=f"Postbus on PostgreSQL {row[0] if row else '?'}", empty="")
    out = console()
    out.print()
    for name, held in result.checks:
        mark = Text("ok     ", style="green") if held else Text("WRONG  ", style="bold red")
        out.print(mark + Text(name))
    if found is not None:
        out.print(f"\nthe report: {report}")
    elif lacking:
        notes().print(f"\nno lake: {', '.join(lacking)} missing, pip install 'postbus\\[spark]'")
    if result.wrong:
        raise typer.Exit(1)


def _facts(lake: _lake.Lake) -> dict[str, str]:
    return {
        "events archived in the lake": f"{lake.archived:,}",
        "rows mirrored in the lake": f"{lake.mirrored:,}",
        "  files of both": f"{lake.files} ({amount(lake.bytes)})",
        **{
            f"  orders that are {status}, their events": f"{orders:,}, {events:,}"
            for status, (orders, events) in lake.orders.items()
        },
        "time for the lake, with the start of Spark": f"{lake.seconds:.1f} s",
    }


@contextmanager
def _bars() -> Iterator[Callable[[play.Progress], None]]:
    """A line that says what happens, and how far everybody is; only on a terminal."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn())
    wanted = {
        "written": shop.TRANSACTIONS,
        "billed": shop.EVENTS,
        "analysed": shop.EVENTS,
        "mailed": sum(n % shop.PAID_EVERY == 0 for n in shop.ORDERS),
        "mirrored": shop.EVENTS,
    }
    with Bars(*columns, console=notes(), transient=True, disable=not notes().is_terminal) as bars:
        stage = bars.add_task("starting", total=None)
        tasks = {name: bars.add_task(name, total=total) for name, total in wanted.items()}

        def watch(p: play.Progress) -> None:
            bars.update(stage, description=p.stage)
            done = (p.transactions, p.billed, p.analysed, p.mailed, p.mirrored)
            for task, count in zip(tasks.values(), done, strict=True):
                bars.update(task, completed=count)

        yield watch


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
