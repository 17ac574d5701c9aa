"""The page of a report, from figures that were not counted: no database and no Spark."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pytest

from tests.pipelines.report_page import Page

pytest.importorskip("matplotlib")
from postbus.pipelines._report_figures import ALL, BUCKET, Figures
from postbus.pipelines._report_page import About, page
from postbus.pipelines._report_plots import COLOURS, over_time

BEGIN = dt.datetime(2026, 3, 1, 9, 50, tzinfo=dt.UTC)
ABOUT = About(
    run=1, pipeline="report", made_at=BEGIN, since=None, until=None, gap=1800, sources="streams", groups=[]
)  # fmt: skip


def figures(width: int, buckets: int, *, finished: int | None) -> Figures:
    """One stream with an event in each bucket; one queue with as many dead letters."""
    moments = [BEGIN + n * dt.timedelta(seconds=width) for n in range(buckets)]
    queue = {"kind": "queue", "name": "jobs", "group": "", "finished": finished, "retries": finished}
    other = {"events": None, "rate": None, "reason": "x"}
    errors: list[dict[str, Any]] = [
        {**queue, **other, "period": BUCKET, "begins": at, "dead_letters": 1} for at in moments
    ]
    errors.append({**queue, **other, "period": ALL, "begins": BEGIN, "dead_letters": buckets})
    return Figures(
        width=width,
        first=moments[0],
        last=moments[-1],
        streams=[{"stream": "orders", "events": buckets, "first": moments[0], "last": moments[-1]}],
        throughput=[
            {"kind": "stream", "name": "orders", "begins": at, "messages": 1, "per_second": 1 / width}
            for at in moments
        ],
        errors=errors,
    )


@pytest.mark.parametrize(
    ("width", "buckets", "labels"),
    [
        (1, 1, {"09:49:58", "09:50:00", "09:50:03", "2026-03-01"}),
        (1, 3, {"09:49:59", "09:50:00", "09:50:04", "2026-03-01"}),
        (60, 60, {"09:50", "10:00", "10:40", "2026-03-01"}),
        (900, 96, {"12:00", "Mar 02", "08:00", "2026-03-02"}),
        (86400, 20, {"05", "17", "2026-03"}),
    ],
)
def test_a_reader_sees_when_it_was(width: int, buckets: int, labels: set[str]) -> None:
    """However few buckets there are, the axis is of their time."""
    read = Page(page(figures(width, buckets, finished=None), ABOUT))
    assert read.tags["svg"] == 2
    missing = {label: read.text.count(label) for label in labels if read.text.count(label) < 2}
    assert not missing, "on both plots"
    assert not {"2024", "2025", "2027", "2028"} & set(read.text)


def test_what_is_not_known_is_no_zero() -> None:
    """Queues that do not archive may have finished many messages."""
    assert "messages finished" not in Page(page(figures(60, 9, finished=None), ABOUT)).text
    assert "messages finished" in Page(page(figures(60, 9, finished=0), ABOUT)).text


def test_no_latency_is_not_a_latency_of_zero() -> None:
    """A gap in the line, and a dot for what stands alone; counts go down to zero."""
    minute = dt.timedelta(minutes=1)
    points = [(BEGIN + n * minute, 5.0) for n in (0, 1, 2, 6, 10, 11)]

    def drawn(*, whole: bool) -> tuple[str, int]:
        plot = over_time({"a": points}, number=1, title="a", axis="a", width=60, whole=whole)
        (line,) = re.findall(rf'<path d="([^"]*)"[^>]*stroke: {COLOURS[0]}; stroke-width: 1.5', plot.svg)
        return re.sub(r"[^ML]", "", line), len(re.findall(f"<use [^>]*fill: {COLOURS[0]}", plot.svg))

    assert drawn(whole=False) == ("MLLMML", 1)
    strokes, dots = drawn(whole=True)
    assert strokes.count("M") == 1
    assert dots == 0
