"""What the commands of ``postbus pipeline`` share: options, the bar, the closing line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from psycopg.conninfo import make_conninfo
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from postbus.cli._connect import chosen, connect
from postbus.cli._print import done, json_line, notes

if TYPE_CHECKING:
    from postbus.pipelines import Run

Lake = Annotated[str, typer.Option(help="Folder or URL of the lake.", show_default=False)]
Table = Annotated[str, typer.Option("--table", help="Name of the table in the lake.")]
Format = Annotated[str, typer.Option("--format", metavar="[delta|iceberg]", help="Format of the table.")]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the pipeline, which keeps its place.", show_default=False),
]
Master = Annotated[
    str | None,
    typer.Option(help="Where Spark runs: local[4], spark://host:7077, yarn, k8s://...", show_default=False),
]
MaxEvents = Annotated[int, typer.Option("--max-events", min=1, help="Events per micro-batch.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on as events come, until Ctrl-C or SIGTERM.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between micro-batches, with --follow.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures of the run as JSON.")]

Show = Callable[[int, int | None, str], None]


@contextmanager
def target(dsn: str | None) -> Iterator[str]:
    """The DSN of the database, which has the engine. An embedded server runs for as long."""
    with connect(dsn) as conn:
        info = conn.info
        yield chosen(dsn) or make_conninfo(**info.get_parameters(), password=info.password or None)


@contextmanager
def bar(text: str) -> Iterator[Show]:
    """A bar on a terminal; elsewhere nothing."""
    err = notes()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(f"{text}: starting Spark", total=None, rows="")

        def show(rows: int, total: int | None, what: str) -> None:
            progress.update(
                task, completed=rows, total=total or None, description=what, rows=f"{rows:,} rows"
            )

        yield show


def run(dsn: str | None, text: str, as_json: bool, job: Callable[[str, Show], Run]) -> Run:
    """Run a pipeline under a bar, and print its figures."""
    from postbus.pipelines._job import need_extra

    need_extra()
    with target(dsn) as found, bar(text) as show:
        result = job(found, show)
    if as_json:
        json_line(asdict(result))
    else:
        done(f"{text}: {figures(result)}")
    return result


def figures(run: Run) -> str:
    """``1,000 rows, 1.2 MiB in 3.4 s (290 rows/s), run 7``."""
    size = f", {amount(run.bytes)}" if run.bytes else ""
    speed = f" ({run.rows / run.seconds:,.0f} rows/s)" if run.rows and run.seconds else ""
    return f"{run.rows:,} rows{size} in {run.seconds:.1f} s{speed}, run {run.id} of {run.pipeline}"


def amount(size: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
