"""The screen of ``postbus top``: tables of queues and groups that fit the terminal, with sparklines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from postbus.cli._print import visible
from postbus.cli._samples import Row, Sample, Sampler

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:-=+*#@"

# Widths of columns; what the terminal has beyond them goes to sparklines and names.
_NAME = 14
_SPARK = 8
_QUEUES = {"READY": 7, "DELAYED": 7, "FLIGHT": 6, "±/S": 7, "OLDEST": 7, "DEAD": 5}
_GROUPS = {"PENDING": 7, "FLIGHT": 6, "WAIT": 5, "IN/S": 6, "OUT/S": 6, "LAG": 7, "DEAD": 5}


@dataclass(frozen=True)
class Frame:
    """How much room there is. `height` None: as much as it takes."""

    width: int
    height: int | None
    utf8: bool


def screen(sample: Sample, sampler: Sampler, frame: Frame, trouble: str | None = None) -> RenderableType:
    """Everything of one moment. With `trouble` the figures are old, and are shown so."""
    groups = _group_rows(sample, sampler)
    queues = _queue_rows(sample, sampler)
    room = None if frame.height is None else max(2, frame.height - 7)
    many, few = _share(room, len(queues), len(groups))
    lines: list[RenderableType] = [*_header(sample, trouble), Text()]
    lines.append(_table("QUEUE", _QUEUES, _fit(queues, many), frame))
    lines.append(Text())
    lines.append(_table("STREAM / GROUP", _GROUPS, _fit(groups, few), frame))
    if frame.height is not None or sample.findings:
        lines.append(_footer(sample))
    return Lines(*lines)


def sparkline(values: Iterable[float], width: int, *, utf8: bool = True) -> str:
    """The last `width` values as blocks; the highest is a full one.

    Example:
        >>> sparkline([0, 1, 2, 4], 5)
        ' ▂▄█'
    """
    marks = _BLOCKS if utf8 else _PLAIN
    last = list(values)[-width:]
    top = max(last, default=0)
    if top <= 0:
        return " " * len(last)
    steps = len(marks) - 1
    return "".join(marks[0 if v <= 0 else max(1, round(v / top * steps))] for v in last)


def count(value: float) -> str:
    """A number in at most six characters: 9999, 12.3k, 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,999 is 1M, and up to four digits are digits.
        if abs(value) >= max(0.9995 * size, 9999.5):
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def rate(value: float | None, *, sign: bool = False) -> str:
    """A number of messages a second."""
    if value is None:
        return "-"
    text = f"{value:.1f}" if abs(value) < 100 else count(value)
    return f"+{text}" if sign and value > 0 else text


def age(seconds: float) -> str:
    """A time span in at most six characters."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _header(sample: Sample, trouble: str | None) -> list[Text]:
    server, totals = sample.server, sample.totals
    upkeep = next((f["message"] for f in sample.findings if f["object"] == "upkeep"), None)
    first = Text.assemble(
        (visible(f"{trouble}  "), "bold red") if trouble else ("postbus top", "bold"),
        f"  {sample.at.astimezone():%H:%M:%S}  PostgreSQL {server['version'].split()[0]}  ",
        f"{server['database']} on {server['host']}:{server['port']}",
    )
    full = server["connections"] > 0.8 * server["max_connections"]
    old = server["oldest_snapshot_seconds"] > 60
    second = Text.assemble(
        "connections ",
        (f"{server['connections']}/{server['max_connections']}", "yellow" if full else ""),
        "  oldest snapshot ",
        (age(server["oldest_snapshot_seconds"]), "yellow" if old else ""),
        "  upkeep ",
        ("missing", "bold red") if upkeep else ("ok", ""),
        f"  queues {rate(totals['in_per_second'])} in/s, {rate(totals['out_per_second'])} out/s",
    )
    for line in (first, second):
        line.no_wrap, line.overflow = True, "ellipsis"
    return [first, second]


def _footer(sample: Sample) -> Text:
    if not sample.findings:
        return Text("q quits", style="dim")
    worst = min(sample.findings, key=lambda f: f["level"] != "fail")
    more = f" (and {len(sample.findings) - 1} more: postbus doctor)" if len(sample.findings) > 1 else ""
    line = Text.assemble(
        ("! ", "bold red" if worst["level"] == "fail" else "bold yellow"),
        visible(f"{worst['object']} {worst['message']}: {worst['remedy']}"),
        more,
    )
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


@dataclass(frozen=True)
class _Line:
    name: str
    style: str
    cells: tuple[tuple[str, str], ...]
    past: Sequence[float]
    weight: float


def _queue_rows(sample: Sample, sampler: Sampler) -> list[_Line]:
    return [
        _Line(
            visible(queue),
            "dim" if row["paused"] else "",
            (
                (count(row["ready"]), ""),
                (count(row["delayed"]), ""),
                (count(row["in_flight"]), ""),
                (rate(row["change_per_second"], sign=True), ""),
                (age(row["oldest_message_age_seconds"]) if row["ready"] else "-", ""),
                (count(row["dead_lettered"]), "red" if row["dead_lettered"] else ""),
            ),
            sampler.past[queue],
            row["depth"],
        )
        for queue, row in sample.queues.items()
    ]


def _group_rows(sample: Sample, sampler: Sampler) -> list[_Line]:
    lines = []
    for stream, row in sample.streams.items():
        of = {group: g for (s, group), g in sample.groups.items() if s == stream}
        weight = max((g["pending_events"] for g in of.values()), default=0)
        cells = (*[("", "")] * 3, (rate(row["in_per_second"]), ""), *[("", "")] * 3)
        style = "dim" if row["paused"] else "bold"
        lines.append(_Line(visible(stream), style, cells, sampler.past[stream], weight + 0.5))
        lines += [_group_row(f" {group}", g, sampler.past[stream, group]) for group, g in of.items()]
    return lines


def _group_row(name: str, row: Row, past: Sequence[float]) -> _Line:
    lost = row["lost"]
    cells = (
        ("lost" if lost else count(row["pending_events"]), "bold red" if lost else ""),
        (count(row["in_flight"]), ""),
        (count(row["waiting"]), ""),
        ("", ""),
        (rate(row["out_per_second"]), ""),
        (age(row["lag_seconds"]) if row["pending_events"] else "-", ""),
        (count(row["dead_lettered"]), "red" if row["dead_lettered"] else ""),
    )
    return _Line(visible(name), "dim" if row["paused"] else "", cells, past, row["pending_events"])


def _share(room: int | None, first: int, second: int) -> tuple[int | None, int | None]:
    """Divide the lines between two lists; what one does not need the other gets."""
    if room is None:
        return None, None
    half = room // 2
    one = min(first or 1, max(half, room - (second or 1)))
    return one, room - one


def _fit(lines: list[_Line], room: int | None) -> list[_Line]:
    """Where not all of them fit, those with the most in them."""
    if room is None or len(lines) <= room:
        return lines
    kept = {id(line) for line in sorted(lines, key=lambda line: -line.weight)[: max(0, room - 1)]}
    rest = _Line(f"... {len(lines) - len(kept)} more", "dim", (), (), 0)
    return [*(line for line in lines if id(line) in kept), rest]


def _table(title: str, columns: dict[str, int], lines: list[_Line], frame: Frame) -> Table:
    name = _NAME + max(0, frame.width - 80) // 3
    spark = max(_SPARK, frame.width - name - sum(columns.values()) - len(columns) - 1)
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold reverse")
    grid.add_column(title, width=name, no_wrap=True, overflow="ellipsis")
    for heading, width in columns.items():
        text = heading if frame.utf8 else heading.replace("±", "+-")
        grid.add_column(text, width=width, justify="right", no_wrap=True)
    grid.add_column("", width=spark, no_wrap=True)
    for line in lines:
        cells = [Text(text, style=style or line.style) for text, style in line.cells]
        cells += [Text()] * (len(columns) - len(cells))
        marks = Text(sparkline(line.past, spark, utf8=frame.utf8), style="cyan", justify="right")
        grid.add_row(Text(line.name, style=line.style), *cells, marks)
    if not lines:
        grid.add_row(Text("none", style="dim"), *[""] * (len(columns) + 1))
    return grid
