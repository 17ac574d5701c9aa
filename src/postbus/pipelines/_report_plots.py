"""The plots of a report, as SVG to put into the page.

No name from the data is drawn: matplotlib would take some for formulas and lacks letters for others. Names
are in the legend, which is HTML. Colours of text and lines are the page's, light or dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Readable on white and on black.
COLOURS = ("#3b7dd8", "#cf7a24", "#2f9e6e", "#c2417c", "#8a63d2", "#8d8d30", "#2a9db0", "#888888")
_TEXT, _RULE = "#010203", "#040506"  # stand for the colours of the page
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "postbus",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.edgecolor": _RULE,
    "grid.color": _RULE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

MOST_BARS = 300  # beyond that, a line says the same in less space
FEWEST = 5  # buckets that an axis is long: left alone, that of a single one spans years

# Labels of an axis of time by what its ticks are: years, months, days, hours, minutes, seconds.
_TICKS = ["%Y", "%b", "%d", "%H:%M", "%H:%M", "%H:%M:%S"]
_FIRST_TICKS = ["", "%Y", "%b", "%b %d", "%H:%M", "%H:%M:%S"]  # of a year, a month, a day, an hour, a minute
_CORNER = ["", "%Y", "%Y-%m", "%Y-%m-%d", "%Y-%m-%d", "%Y-%m-%d"]

Points = Sequence[tuple[datetime, float]]


@dataclass(frozen=True)
class Plot:
    """A picture, and which colour is whose."""

    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def over_time(
    series: Mapping[str, Points],
    *,
    number: int,
    title: str,
    axis: str,
    width: int,
    bars: bool = False,
    whole: bool = True,
) -> Plot:
    """Lines or stacked bars over buckets of so many seconds.

    Where there is no bucket there was nothing: counts are zero there, other values are not known.

    Args:
        series: points by name, in the order of time.
        number: of the plot on its page.
        title: for those who cannot see it.
        axis: what is drawn.
        width: seconds of a bucket.
        bars: bars instead of lines.
        whole: the values are counts.
    """
    from matplotlib import dates

    step = timedelta(seconds=width)
    bars = bars and sum(map(len, series.values())) <= MOST_BARS
    with _drawing() as (figure, axes):
        below: dict[datetime, float] = {}
        for colour, points in zip(COLOURS, series.values(), strict=False):
            if bars:
                times = [at for at, _ in points]
                bottoms = [below.get(at, 0.0) for at in times]
                axes.bar(
                    times, [v for _, v in points], width=step, bottom=bottoms, align="edge", color=colour
                )
                below.update({at: bottom + v for (at, v), bottom in zip(points, bottoms, strict=True)})
            else:
                filled = _filled(points, step, 0.0 if whole else math.nan)
                dots = _dots([v for _, v in filled])
                axes.plot(
                    [at + step / 2 for at, _ in filled],
                    [v for _, v in filled],
                    color=colour,
                    linewidth=1.5,
                    marker="o" if dots else "",
                    markersize=3,
                    markevery=dots or None,
                )
        axes.set_xlim(*_ends(series, step))
        locator = dates.AutoDateLocator(tz=UTC, minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        formatter = dates.ConciseDateFormatter(  # type: ignore[no-untyped-call]
            locator, tz=UTC, formats=_TICKS, zero_formats=_FIRST_TICKS, offset_formats=_CORNER
        )
        axes.xaxis.set_major_formatter(formatter)
        _label(axes, axis, whole)
        svg = _svg(figure, number, title)
    return Plot(svg, tuple(zip(COLOURS, series, strict=False)))


def _ends(series: Mapping[str, Points], step: timedelta) -> tuple[datetime, datetime]:
    """The first and the last moment of the axis: whole buckets, and not too few."""
    first = min(points[0][0] for points in series.values())
    last = max(points[-1][0] for points in series.values()) + step
    room = max(FEWEST * step - (last - first), timedelta()) / 2
    return first - room, last + room


def _filled(points: Points, step: timedelta, nothing: float) -> list[tuple[datetime, float]]:
    """Points at nothing on both sides of a gap are enough for a line."""
    there = dict(points)
    for at, _ in points:
        for neighbour in (at - step, at + step):
            there.setdefault(neighbour, nothing)
    first, last = points[0][0], points[-1][0]
    return sorted((at, v) for at, v in there.items() if first <= at <= last)


def _dots(values: Sequence[float]) -> list[int]:
    """Which points a line does not show well: all of a few, and those between two gaps."""
    around = [math.nan, *values, math.nan]
    return [
        i for i, value in enumerate(values)
        if not math.isnan(value)
        and (len(values) <= 5 or (math.isnan(around[i]) and math.isnan(around[i + 2])))
    ]  # fmt: skip


def classes(values: Mapping[str, int], *, number: int, title: str, axis: str) -> Plot:
    """One bar for each class; their names are ours."""
    with _drawing() as (figure, axes):
        axes.bar(list(values), list(values.values()), color=COLOURS[0], width=0.7)
        _label(axes, axis, True)
        svg = _svg(figure, number, title)
    return Plot(svg)


@contextmanager
def _drawing() -> Iterator[tuple[Figure, Any]]:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(8, 2.6), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def _label(axes: Axes, axis: str, whole: bool) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_ylabel(axis)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=whole))
    if whole or axes.get_ylim()[1] > 10:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _svg(figure: Figure, number: int, title: str) -> str:
    """The picture as a part of a page: without what files have, with a title, with ids of its own."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="|"#|url\(#', lambda m: f"{m[0]}p{number}-", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    body = body.replace(_TEXT, "currentColor").replace(_RULE, "var(--rule)")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    name = f"plot{number}"
    return (
        f'<svg {box[0]} role="img" aria-labelledby="{name}" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}">{escape(title)}</title>{body}'
    )
