"""Figures: medians, percentiles, and the ratio of two systems with its target."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

median = statistics.median


def percentile(values: Sequence[float], share: float) -> float:
    """The value that the given share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def known(values: Iterable[float | None]) -> list[float]:
    """The values, or none of them where one is missing."""
    values = list(values)
    given = [value for value in values if value is not None]
    return given if len(given) == len(values) else []


@dataclass(frozen=True)
class Line:
    """One comparison: what two systems, or the start and the end of a run, came to."""

    case: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    low: float
    high: float
    target: float | None = None
    at_most: bool = False
    their_name: str = "pgmq"

    @property
    def verdict(self) -> str:
        """Whether the target is met: "ok" or "below", or nothing where there is no target."""
        if self.target is None:
            return ""
        met = self.ratio <= self.target if self.at_most else self.ratio >= self.target
        return "ok" if met else "below"

    @property
    def target_text(self) -> str:
        """The target as a reader expects it."""
        if self.target is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {self.target:g}"


def compare(
    case: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    target: float | None = None,
    *,
    at_most: bool = False,
    beside: str = "pgmq",
) -> Line:
    """Compare round by round; the ratio is the median of the ratios of the rounds."""
    ratios = [mine / peer for mine, peer in zip(ours, theirs, strict=True)]
    return Line(
        case,
        median(ours),
        median(theirs),
        unit,
        median(ratios),
        min(ratios),
        max(ratios),
        target,
        at_most,
        beside,
    )
