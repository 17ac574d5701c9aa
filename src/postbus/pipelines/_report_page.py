"""The page of a report: one HTML file, with nothing to load and nothing to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from html import escape

from postbus.pipelines import _report_plots as plots
from postbus.pipelines._report_figures import ALL, BUCKET, LENGTH_NAMES, Figures, Rows
from postbus.pipelines._report_html import (
    STYLE,
    figure,
    name_of,
    number,
    pace,
    share,
    span,
    stamp,
    table,
    when,
)

SERIES = 7  # lines of a plot; the rest is one more
QUEUES = 6  # plots of latency


@dataclass(frozen=True)
class About:
    """What the page says of itself."""

    run: int
    pipeline: str
    made_at: datetime
    since: datetime | None
    until: datetime | None
    gap: float
    sources: str
    groups: Rows  # how far behind they are now


def page(found: Figures, about: About) -> str:
    """The whole file."""
    body = "\n".join(_parts(found, about))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Should a name slip through unescaped, it still could not run or fetch anything.
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>Postbus report</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _parts(found: Figures, about: About) -> Iterator[str]:
    numbers = iter(range(1, 1000))
    yield _head(found, about)
    yield from _streams(found, numbers)
    yield from _tops(found)
    yield from _sessions(found, about, numbers)
    yield from _latency(found, numbers)
    yield from _errors(found, numbers)
    yield from _groups(about)


def _head(found: Figures, about: About) -> str:
    since, until = about.since or found.first, about.until or found.last
    period = f"{stamp(since)} to {stamp(until)}" if since and until else "nothing was found"
    tiles = {"events": found.events, "streams with events": len(found.streams)}
    if any(row["finished"] is not None for row in found.errors):  # else no queue keeps what it has finished
        tiles |= {"messages finished": found.total("finished"), "retries": found.total("retries")}
    tiles["dead letters"] = found.total("dead_letters")
    shown = "".join(f"<div><dt>{name}</dt><dd>{value:,}</dd></div>" for name, value in tiles.items())
    return (
        f'<h1>Postbus report</h1>\n<p class="soft">{period}. All times are UTC; one bucket is'
        f" {span(found.width)}. From {escape(about.sources)}. Made {stamp(about.made_at)} by run {about.run}"
        f" of pipeline {name_of(about.pipeline)}.</p>\n<dl>{shown}</dl>"
    )


def _streams(found: Figures, numbers: Iterator[int]) -> Iterator[str]:
    yield "<h2>Throughput</h2>"
    each = f"per {span(found.width)}"
    for kind, what in (("stream", "Events published"), ("queue", "Messages finished")):
        rows = [row for row in found.throughput if row["kind"] == kind]
        if rows:
            lines = series(rows, "messages")
            title = f"{what}, {each}: {peak(lines)}"
            plot = plots.over_time(lines, number=next(numbers), title=title, axis=each, width=found.width)
            yield figure(plot, f"{what}, {each}.")
    if not found.streams:
        yield "<p>There are no events.</p>"
        return
    seconds = {row["stream"]: max((row["last"] - row["first"]).total_seconds(), 1) for row in found.streams}
    yield table(
        "streams",
        ("stream", "events", "on average", "first", "last"),
        (
            (
                name_of(row["stream"]), f"{row['events']:,}",
                pace(row["events"] / seconds[row["stream"]]), when(row["first"]), when(row["last"]),
            )
            for row in sorted(found.streams, key=lambda row: -row["events"])
        ),
        numbers=(1, 2),
    )  # fmt: skip


def _tops(found: Figures) -> Iterator[str]:
    if found.types:
        yield "<h2>Types</h2>"
        yield table(
            "types",
            ("stream", "type", "events", "of the stream's events"),
            (
                (name_of(row["stream"]), name_of(row["type"]), f"{row['events']:,}", share(row["share"]))
                for row in sorted(found.types, key=lambda row: -row["events"])
            ),
            numbers=(2,),
        )
    if found.keys:
        yield "<h2>Keys</h2>"
        yield table(
            "keys",
            ("stream", "key", "events", "sessions", "of the stream's events with a key"),
            (
                (
                    name_of(row["stream"]), name_of(row["key"]), f"{row['events']:,}", f"{row['sessions']:,}",
                    share(row["share"]),
                )
                for row in sorted(found.keys, key=lambda row: -row["events"])
            ),
            numbers=(2, 3),
        )  # fmt: skip


def _sessions(found: Figures, about: About, numbers: Iterator[int]) -> Iterator[str]:
    whole = [row for row in found.sessions if row["length"] == ALL]
    if not whole:
        return
    yield "<h2>Sessions</h2>"
    yield (
        f'<p class="soft">Events of one key with no more than {span(about.gap)} between each and the next are'
        " one session. It lasts from its first event to its last.</p>"
    )
    counts = dict.fromkeys(LENGTH_NAMES, 0)
    for row in found.sessions:
        if row["length"] != ALL:
            counts[row["length"]] += row["sessions"]
    title = "Sessions by length: " + ", ".join(f"{name}: {n:,}" for name, n in counts.items())
    yield figure(plots.classes(counts, number=next(numbers), title=title, axis="sessions"), "By length.")
    heads = (
        "stream",
        "sessions",
        "keys",
        "per key",
        "events each",
        "half last up to",
        "95 % up to",
        "longest",
    )
    yield table(
        "sessions",
        heads,
        (
            (
                name_of(row["stream"]), f"{row['sessions']:,}", f"{row['keys']:,}",
                f"{row['sessions'] / row['keys']:,.1f}", f"{row['events'] / row['sessions']:,.1f}",
                span(row["p50"]), span(row["p95"]), span(row["max"]),
            )
            for row in sorted(whole, key=lambda row: -row["sessions"])
        ),
        numbers=range(1, 8),
    )  # fmt: skip


def _latency(found: Figures, numbers: Iterator[int]) -> Iterator[str]:
    yield "<h2>Latency</h2>"
    yield (
        '<p class="soft">From sending to finishing, delays and retries included, of queues that archive what'
        " is finished. Of streams only dead letters are known: a group leaves no record of when it was done"
        " with an event.</p>"
    )
    whole = sorted((r for r in found.latency if r["period"] == ALL), key=lambda r: -r["messages"])
    queues = [row["name"] for row in whole if row["outcome"] == "finished"]
    for queue in queues[:QUEUES]:
        rows = [
            r for r in found.latency
            if r["name"] == queue and r["outcome"] == "finished" and r["period"] == BUCKET
        ]  # fmt: skip
        lines = {f"{p} %": [(r["begins"], r[f"p{p}"]) for r in rows] for p in (99, 95, 50)}
        plot = plots.over_time(
            lines, number=next(numbers), axis="seconds", width=found.width, whole=False,
            title=f"Seconds from sending to finishing, over time: {peak(lines)}",
        )  # fmt: skip
        yield figure(plot, f"Queue {name_of(queue)}: so many of its messages were faster.")
    heads = ("queue or stream", "group", "outcome", "messages", "50 %", "95 %", "99 %", "slowest")
    cells = (
        (
            name_of(row["name"]), name_of(row["group"]), row["outcome"], f"{row['messages']:,}",
            *(span(row[p]) for p in ("p50", "p95", "p99", "max")),
        )
        for row in whole
    )  # fmt: skip
    yield table("latency", heads, cells, numbers=range(3, 8)) if whole else "<p>Nothing is known.</p>"


def _errors(found: Figures, numbers: Iterator[int]) -> Iterator[str]:
    yield "<h2>Errors</h2>"
    dead = [row for row in found.errors if row["period"] == BUCKET and row["dead_letters"]]
    if dead:
        merged: dict[tuple[str, datetime], int] = {}
        for row in dead:
            place = (row["name"], row["begins"])
            merged[place] = merged.get(place, 0) + row["dead_letters"]
        points = [{"name": n, "begins": at, "dead_letters": v} for (n, at), v in sorted(merged.items())]
        lines = series(points, "dead_letters")
        plot = plots.over_time(
            lines, number=next(numbers), axis=f"per {span(found.width)}", width=found.width, bars=True,
            title=f"Dead letters, over time: {peak(lines)}",
        )  # fmt: skip
        yield figure(plot, "Dead letters that are still there, by when they died.")
    whole = [row for row in found.errors if row["period"] == ALL]
    if not whole:
        yield "<p>There are no dead letters.</p>"
        return
    heads = (
        "queue or stream",
        "group",
        "dead letters",
        "finished",
        "events",
        "retries",
        "rate",
        "most often",
    )
    yield table(
        "errors",
        heads,
        (
            (
                name_of(row["name"]), name_of(row["group"]), *(number(row[n]) for n in (
                    "dead_letters", "finished", "events", "retries")),
                "" if row["rate"] is None else f"{row['rate']:.2%}", name_of(row["reason"] or ""),
            )
            for row in sorted(whole, key=lambda row: -row["dead_letters"])
        ),
        numbers=range(2, 7),
    )  # fmt: skip


def _groups(about: About) -> Iterator[str]:
    if about.groups:
        yield "<h2>Groups now</h2>"
        heads = ("stream", "group", "pending", "behind", "out with workers", "waiting")
        yield table(
            "groups",
            heads,
            (
                (
                    name_of(row["stream"]), name_of(row["group"]), number(row["pending"]),
                    "lost" if row["lost"] else span(row["lag"].total_seconds()),
                    number(row["in_flight"]), number(row["waiting"]),
                )
                for row in sorted(about.groups, key=lambda row: -(row["pending"] or 0))
            ),
            numbers=range(2, 6),
        )  # fmt: skip


def series(rows: Rows, column: str) -> dict[str, list[tuple[datetime, float]]]:
    """Points by name, those with most first; what is left over becomes one series."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["name"]] = sums.get(row["name"], 0) + row[column]
    names = sorted(sums, key=lambda name: (-sums[name], name))
    alone = names if len(names) <= SERIES + 1 else names[:SERIES]
    found: dict[str, dict[datetime, float]] = {name: {} for name in alone}
    for row in rows:
        name = row["name"] if row["name"] in found else f"{len(names) - len(alone)} others"
        points = found.setdefault(name, {})
        points[row["begins"]] = points.get(row["begins"], 0) + row[column]
    return {name: sorted(points.items()) for name, points in found.items()}


def peak(lines: Mapping[str, list[tuple[datetime, float]]]) -> str:
    """What a plot shows, for those who cannot see it."""
    value, at = max((value, at) for points in lines.values() for at, value in points)
    count = f"{len(lines)} lines, " if len(lines) > 1 else ""
    return f"{count}highest {value:,.4g}, at {stamp(at)}"
