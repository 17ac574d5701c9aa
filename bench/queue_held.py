"""A queue while a snapshot is held open: does it keep the pace, and does receive stay as fast?"""

from __future__ import annotations

from rich.table import Table

from bench._database import Database
from bench._main import single
from bench._options import Options
from bench._peers import PAYLOAD
from bench._queue_held import BATCH, CONSUMERS, PAUSE, RATE, Held, Part, hold
from bench._queue_work import SYSTEMS
from bench._report import Report, Steps, number
from bench._stats import Line, median, percentile

TARGET_RATE, TARGET_GROWTH = 0.95, 1.5


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Measure one system after the other."""
    seconds = options.scale.queue_held
    parts = max(3, round(seconds / 60))
    report = Report(
        "Queues under a held snapshot",
        {
            **db.settings,
            "synchronous_commit": "off",
            "load": f"{RATE} messages/s, one message a transaction, one producer",
            "consumers": f"{CONSUMERS}, batches of {BATCH}, {PAUSE * 1000:g} ms of pause after less",
            "payload": f"{len(PAYLOAD)} bytes",
            "seconds": f"{seconds:g}, in {parts} parts",
            "maintain": "every second",
            "autovacuum": "on",
        },
    )
    steps.begin("queue, held snapshot", len(SYSTEMS))
    for system in reversed(SYSTEMS):
        with steps.step(f"{system}, {seconds:g} s"):
            held = hold(db, system, seconds, parts)
        _add(report, system, held)
        with db.connect() as conn:
            conn.execute("vacuum")
    return report


def _add(report: Report, system: str, held: Held) -> None:
    ours = system == "postbus"
    achieved = sum(part.messages for part in held.parts) / held.seconds
    ratio = achieved / RATE
    report.lines.append(
        Line(f"{system}: rate", achieved, RATE, "messages/s", ratio, ratio, ratio,
             TARGET_RATE if ours else None, their_name="offered")
    )  # fmt: skip
    for name, pick in (("receive", _read), ("ack", _finish)):
        medians = [median(pick(part)) for part in held.parts if pick(part)]
        first, worst = medians[0], max(medians[1:])
        growth = worst / first
        target = TARGET_GROWTH if ours and name == "receive" else None
        report.lines.append(
            Line(f"{system}: {name} p50, slowest part", worst, first, "ms", growth, growth, growth,
                 target, at_most=True, their_name="first part")
        )  # fmt: skip
    cpus = [part.cpu / part.messages for part in held.parts if part.cpu and part.messages]
    if len(cpus) > 1:
        growth = max(cpus[1:]) / cpus[0]
        report.lines.append(
            Line(f"{system}: CPU of a message, highest part", max(cpus[1:]), cpus[0], "ms",
                 growth, growth, growth, their_name="first part")
        )  # fmt: skip
    report.tables.append(_table(system, held))
    report.notes.append(_note(system, held))
    report.details[system] = {
        "sent": held.sent,
        "left": held.left,
        "dead rows": held.dead,
        "marks": held.marks,
        "parts": [
            {"messages": part.messages, "receive": _spread(part.read), "ack": _spread(part.finish)}
            for part in held.parts
        ],
    }


def _note(system: str, held: Held) -> str:
    dead = ", ".join(f"{name} {count:,}" for name, count in held.dead.items()) or "none"
    medians = ", ".join(f"{median(part.read):.2f}" if part.read else "-" for part in held.parts)
    rates = ", ".join(number(part.messages / held.seconds * len(held.parts)) for part in held.parts)
    note = (
        f"- {system}: {rates} messages/s by parts, receive p50 {medians} ms;"
        f" sent {held.sent / held.seconds:,.0f}/s, {held.left:,} left at the end; dead rows: {dead}"
    )
    if held.marks:
        note += f"; marks: {held.marks}; maintain p95 {percentile(held.maintain or [0.0], 0.95):.1f} ms"
    return note + "."


def _read(part: Part) -> list[float]:
    return part.read


def _finish(part: Part) -> list[float]:
    return part.finish


def _spread(values: list[float]) -> str:
    return f"{median(values):.3f} / {percentile(values, 0.95):.3f}" if values else "-"


def _table(system: str, held: Held) -> Table:
    table = Table(title=f"{system}: median / p95 in ms", title_justify="left")
    for column in ("part", "messages/s", "messages a batch", "receive", "ack", "empty reads"):
        table.add_column(column, justify="right")
    for i, part in enumerate(held.parts, 1):
        rate = part.messages / held.seconds * len(held.parts)
        full = part.messages / len(part.read) if part.read else 0.0
        table.add_row(
            str(i), number(rate), f"{full:.1f}", _spread(part.read), _spread(part.finish), str(part.empty)
        )
    return table


if __name__ == "__main__":
    single("A queue under a snapshot that is held open.", run, seconds="queue_held")
