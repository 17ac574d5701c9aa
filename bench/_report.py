"""What a run shows: progress while it lasts, tables and a JSON file at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench._stats import Line

console = Console() if sys.stdout.isatty() else Console(width=130)

_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"


@dataclass
class Report:
    """The results of one benchmark and the settings they were measured with."""

    title: str
    settings: dict[str, str]
    lines: list[Line] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


class Steps:
    """The progress display: one bar a benchmark."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, title: str, total: int) -> None:
        """Start the bar of a benchmark that has so many steps."""
        self._task = self._progress.add_task(title, total=total, now="")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show what is measured now; the bar moves when it is done."""
        assert self._task is not None
        self._progress.update(self._task, now=what)
        yield
        self._progress.update(self._task, advance=1, now="")


@contextmanager
def steps() -> Iterator[Steps]:
    """Show progress while the benchmarks run."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield Steps(progress)


def number(value: float) -> str:
    """A figure with three digits that count, and thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(reports: list[Report]) -> None:
    """Print the settings, the tables of detail and, last, the table of ratios."""
    for report in reports:
        console.print()
        console.print(f"[bold]{report.title}[/bold]")
        console.print(", ".join(f"{name} {value}" for name, value in report.settings.items()), style="dim")
        for detail in report.tables:
            console.print(detail)
        for note in report.notes:
            console.print(note)
    table = Table(title="Ratios", title_justify="left")
    table.add_column("case")
    for column in ("measured", "beside", "unit", "ratio", "lowest-highest", "target", ""):
        table.add_column(column, justify="right" if column != "unit" else "left")
    for report in reports:
        for line in report.lines:
            colour = {"ok": "green", "below": "red"}.get(line.verdict, "")
            table.add_row(
                line.case,
                number(line.ours),
                f"{line.their_name} {number(line.theirs)}",
                line.unit,
                f"[bold]{line.ratio:.2f}[/bold]",
                f"{line.low:.2f}-{line.high:.2f}" if line.low < line.high else "",
                line.target_text,
                f"[{colour}]{line.verdict}[/{colour}]" if colour else "",
            )
        table.add_section()
    console.print()
    console.print(table)


def write(path: Path, reports: list[Report]) -> None:
    """Write everything to a JSON file."""
    data = [
        {
            "title": report.title,
            "settings": report.settings,
            "lines": [_line(line) for line in report.lines],
            "details": report.details,
        }
        for report in reports
    ]
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_markdown(path: Path, reports: list[Report]) -> None:
    """Replace the sections of these benchmarks between the two result marks of a page."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    old, found, after = rest.partition(_END)
    if not found:
        raise ValueError(f"{path} has no {_BEGIN} and {_END}")
    sections = {part.splitlines()[0]: part.strip() for part in old.split("### ")[1:]}
    sections |= {report.title: _markdown(report) for report in reports}
    results = "\n\n".join(f"### {section}" for section in sections.values())
    path.write_text(f"{before}{_BEGIN}\n\n{results}\n\n{_END}{after}", encoding="utf-8")


def _markdown(report: Report) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    rows = [
        report.title,
        "",
        f"{settings}.",
        "",
        "| case | measured | beside | unit | ratio | lowest to highest | target | |",
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    for line in report.lines:
        beside = f"{line.their_name} {number(line.theirs)}"
        span = f"{line.low:.2f} to {line.high:.2f}" if line.low < line.high else ""
        cells = (line.case, number(line.ours), beside, line.unit, f"**{line.ratio:.2f}**", span)
        rows.append(f"| {' | '.join(cells)} | {line.target_text} | {line.verdict} |")
    return "\n".join([*rows, "", *report.notes]).rstrip()


def _line(line: Line) -> Mapping[str, Any]:
    return {**asdict(line), "verdict": line.verdict}
