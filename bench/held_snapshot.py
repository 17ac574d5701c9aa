"""A snapshot held open: do consume and ack stay as fast while old row versions cannot be removed?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rich.table import Table

from bench._database import Database
from bench._held import BATCH, KINDS, PARTS, RATE, Held, Part, hold
from bench._main import single
from bench._options import Options
from bench._peers import PAYLOAD
from bench._report import Report, Steps, number
from bench._stats import Line, median, percentile

TARGET = 1.3
CALLS = {"postbus": ("consume", "ack"), "pgmq": ("read", "delete")}


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Measure both kinds of snapshot, one system after the other."""
    seconds = options.scale.held
    report = Report(
        "A snapshot held open",
        {
            **db.settings,
            "synchronous_commit": "off",
            "load": f"{RATE} batches/s of {BATCH} events, one producer, one consumer",
            "payload": f"{len(PAYLOAD)} bytes",
            "seconds": f"{seconds:g}, compared by thirds",
            "maintain": "every second",
            "autovacuum": "on",
        },
    )
    steps.begin("held snapshot", len(KINDS) * len(CALLS))
    for number_, kind in enumerate(KINDS):
        for system in CALLS:
            with steps.step(f"{system}, snapshot {kind}, {seconds:g} s"):
                held = hold(db, kind, system, f"held{number_}", seconds)
            _add(report, kind, system, held)
            with db.connect() as conn:
                conn.execute("vacuum analyze")
    return report


def _add(report: Report, kind: str, system: str, held: Held) -> None:
    read, finish = CALLS[system]
    target = TARGET if system == "postbus" else None
    for name, pick in ((read, _read), (finish, _finish)):
        report.lines.append(_growth(f"{kind}: {system} {name}", held, pick, target))
    first, last = held.parts[0].cpu, held.parts[-1].cpu
    if first and last:
        report.lines.append(_line(f"{kind}: {system} CPU of both", first, last, None))
    report.tables.append(_times(kind, system, held))
    report.notes.append(_note(kind, system, held))
    if held.before:
        report.tables.append(_costs(kind, held))
    report.details[f"{kind}, {system}"] = {
        "parts": [
            {
                "batches/s": len(p.read) / held.seconds * PARTS,
                read: _spread(p.read),
                finish: _spread(p.finish),
            }
            for p in held.parts
        ],
        "lookups before": {name: asdict(lookup) for name, lookup in held.before.items()},
        "lookups after": {name: asdict(lookup) for name, lookup in held.after.items()},
        "dead rows": held.dead,
    }


def _note(kind: str, system: str, held: Held) -> str:
    rates = ", ".join(f"{len(part.read) / held.seconds * PARTS:.0f}" for part in held.parts)
    note = f"{kind}, {system}: {rates} batches/s by thirds; dead rows at the end: {_dead(held)}."
    if held.before:
        pages = ", ".join(
            f"{name} {b.buffers} to {held.after[name].buffers}" for name, b in held.before.items()
        )
        note += f" Pages touched by hot lookups, from start to end: {pages}."
    return f"- {note}"


def _dead(held: Held) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in held.dead.items()) or "none"


def _read(part: Part) -> list[float]:
    return part.read


def _finish(part: Part) -> list[float]:
    return part.finish


def _growth(case: str, held: Held, pick: Callable[[Part], list[float]], target: float | None) -> Line:
    return _line(case, median(pick(held.parts[0])), median(pick(held.parts[-1])), target)


def _line(case: str, first: float, last: float, target: float | None) -> Line:
    ratio = last / first
    return Line(case, last, first, "ms", ratio, ratio, ratio, target, at_most=True, their_name="first third")


def _spread(values: list[float]) -> str:
    return f"{median(values):.3f} / {percentile(values, 0.95):.3f}" if values else "-"


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _times(kind: str, system: str, held: Held) -> Table:
    read, finish = CALLS[system]
    table = Table(title=f"{system}, snapshot {kind}: median / p95 in ms", title_justify="left")
    for column in ("third", "batches/s", read, finish, "CPU of both", "empty reads", "maintain"):
        table.add_column(column, justify="right")
    for i, part in enumerate(held.parts):
        rate = len(part.read) / held.seconds * PARTS
        cells = (
            _spread(part.read),
            _spread(part.finish),
            _mean(part.cpu),
            str(part.empty),
            _spread(part.maintain),
        )
        table.add_row(f"{i + 1} of {PARTS}", number(rate), *cells)
    table.caption = f"dead rows at the end: {_dead(held)}"
    table.caption_justify = "left"
    return table


def _costs(kind: str, held: Held) -> Table:
    table = Table(
        title=f"postbus, snapshot {kind}: hot lookups, explain (analyze, buffers)", title_justify="left"
    )
    for column in ("lookup", "pages, start", "pages, end", "ms, start", "ms, end"):
        table.add_column(column, justify="left" if column == "lookup" else "right")
    for name, before in held.before.items():
        after = held.after[name]
        table.add_row(name, str(before.buffers), str(after.buffers), f"{before.ms:.3f}", f"{after.ms:.3f}")
    return table


if __name__ == "__main__":
    single("Consume and ack under a snapshot that is held open.", run, seconds="held")
