"""The figures of a report, counted by Spark. What comes back is small: rows for tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument
from postbus.pipelines._report_data import moment

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Rows = list[dict[str, Any]]

SECOND = 1_000_000
# Buckets that a person reads without counting.
WIDTHS = (1, 5, 10, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 604800, 2419200)
ABOUT, MOST = 120, 10_000  # so many buckets are chosen, and are allowed
# How long sessions are: up to so many seconds, and what that is called.
LENGTHS = ((10, "up to 10 s"), (60, "up to 1 min"), (600, "up to 10 min"), (3600, "up to 1 h"))
ONE, LONGER = "one event", "longer"
LENGTH_NAMES = (ONE, *(name for _, name in LENGTHS), LONGER)
ALL, BUCKET = "all", "bucket"

_RANKS = "percentile_approx(seconds, array(0.5, 0.95, 0.99), 10000) as ranks"
_SPREAD = (_RANKS, "max(seconds) as max")


@dataclass
class Figures:
    """Everything that is in the tables of a report and on its page."""

    width: int = WIDTHS[0]  # of a bucket, in seconds
    first: datetime | None = None
    last: datetime | None = None
    streams: Rows = field(default_factory=list)
    throughput: Rows = field(default_factory=list)
    types: Rows = field(default_factory=list)
    keys: Rows = field(default_factory=list)
    sessions: Rows = field(default_factory=list)
    latency: Rows = field(default_factory=list)
    errors: Rows = field(default_factory=list)

    @property
    def events(self) -> int:
        """How many events were counted."""
        return sum(row["events"] for row in self.streams)

    def total(self, column: str) -> int:
        """A column of the errors, over the whole period: finished, dead_letters, retries."""
        return sum(row[column] or 0 for row in self.errors if row["period"] == ALL)

    @property
    def counted(self) -> int:
        """Events, finished messages and dead letters."""
        return self.events + self.total("finished") + self.total("dead_letters")


def count(
    events: DataFrame,
    messages: DataFrame,
    archiving: Collection[str],
    *,
    bucket: int | None,
    gap: float,
    top: int,
    watch: Callable[[int], None],
) -> Figures:
    """Count.

    Args:
        events: of `_report_data.events`. Read several times: cached, so that each time it is the same.
        messages: of `_report_data.messages`, cached as well.
        archiving: the queues that keep what is finished.
        bucket: seconds, or None to choose.
        gap: seconds between two events of a key from which on they are of two sessions.
        top: so many types and keys of each stream.
        watch: hears how many events there are, when they have been read.
    """
    found = Figures()
    found.streams = _rows(
        events.groupBy("stream").agg(*_columns("count(*) as events", "min(us) as first", "max(us) as last")),
        "stream",
    )
    watch(found.events)
    (ends,) = _rows(messages.agg(*_columns("min(us) as first", "max(us) as last")))
    times = [
        row[name] for row in [*found.streams, ends] for name in ("first", "last") if row[name] is not None
    ]
    if times:
        found.first, found.last = moment(min(times)), moment(max(times))
        found.width = _width(max(times) - min(times), bucket)
    for row in found.streams:
        row.update(first=moment(row["first"]), last=moment(row["last"]))
    _throughput(found, events)
    found.types = _top(
        events.groupBy("stream", "type").agg(
            *_columns("count(*) as events", "min(us) as first", "max(us) as last")
        ),
        "type",
        top,
        {row["stream"]: row["events"] for row in found.streams},
    )
    _sessions(found, events, gap, top)
    _messages(found, messages, archiving)
    return found


def _width(span: int, asked: int | None) -> int:
    if asked is None:
        return next((w for w in WIDTHS if span <= w * ABOUT * SECOND), WIDTHS[-1])
    if span > asked * MOST * SECOND:
        raise BadArgument(
            f"bucket is {asked} s: too small for {span / SECOND / 86400:.1f} days, at most {MOST:,} buckets",
            hint="Choose a larger bucket (--bucket), or a shorter time (--since, --until).",
        )
    return asked


def _columns(*texts: str) -> list[Column]:
    from pyspark.sql import functions as F  # noqa: N812

    return [F.expr(text) for text in texts]


def _rows(found: DataFrame, *order: str) -> Rows:
    """The rows here, ordered here: there are few."""
    rows = [row.asDict() for row in found.collect()]
    return sorted(rows, key=lambda row: tuple(row[name] for name in order))


def _throughput(found: Figures, events: DataFrame) -> None:
    width = found.width * SECOND
    per_bucket = events.selectExpr("stream", f"us - pmod(us, {width}) as begins").groupBy("stream", "begins")
    for row in _rows(per_bucket.agg(*_columns("count(*) as events")), "stream", "begins"):
        found.throughput.append(_rate("stream", row["stream"], row["begins"], row["events"], found.width))


def _rate(kind: str, name: str, begins: int, messages: int, width: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "begins": moment(begins),
        "messages": messages,
        "per_second": messages / width,
    }


def _top(counted: DataFrame, name: str, top: int, totals: Mapping[str, int]) -> Rows:
    """Those with most events of each stream, by name where they have equally many; with their shares."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    order = Window.partitionBy("stream").orderBy(F.col("events").desc(), F.col(name))
    best = counted.withColumn("rank", F.row_number().over(order)).where(F.col("rank") <= top)
    rows = _rows(best, "stream", "rank")
    for row in rows:
        row.update(
            first=moment(row["first"]), last=moment(row["last"]), share=row["events"] / totals[row["stream"]]
        )
    return rows


def _sessions(found: Figures, events: DataFrame, gap: float, top: int) -> None:
    """Sessions: events of a key with no more than the gap between each and the next."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    in_time = Window.partitionBy("stream", "key").orderBy("us")
    so_far = in_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    since_last = F.col("us") - F.lag("us").over(in_time)
    begins = F.when(since_last <= round(gap * SECOND), 0).otherwise(1)
    numbered = (
        events.where("key is not null")
        .withColumn("begins", begins)
        .withColumn("session", F.sum("begins").over(so_far))
    )
    sessions = (
        numbered.groupBy("stream", "key", "session")
        .agg(*_columns("count(*) as events", "min(us) as first", "max(us) as last"))
        .withColumn("seconds", F.expr(f"(last - first) / {SECOND}D"))
        .persist()
    )
    try:
        per_key = sessions.groupBy("stream", "key").agg(
            *_columns(
                "sum(events) as events", "count(*) as sessions", "min(first) as first", "max(last) as last"
            )
        )
        cases = "".join(f" when seconds <= {limit} then '{name}'" for limit, name in LENGTHS)
        length = f"case when events = 1 then '{ONE}'{cases} else '{LONGER}' end"
        classed = sessions.selectExpr("*", f"explode(array('{ALL}', {length})) as length")
        spread = classed.groupBy("stream", "length").agg(
            *_columns(
                "count(*) as sessions",
                f"count_if(session = 1 and length = '{ALL}') as keys",
                "sum(events) as events",
                *_SPREAD,
            )
        )
        found.sessions = [_spread(row) for row in _rows(spread, "stream", "length")]
        for row in found.sessions:
            row["keys"] = row["keys"] if row["length"] == ALL else None
        with_key = {row["stream"]: row["events"] for row in found.sessions if row["length"] == ALL}
        found.keys = _top(per_key, "key", top, with_key)
    finally:
        sessions.unpersist()


def _spread(row: dict[str, Any]) -> dict[str, Any]:
    """The percentiles as columns."""
    ranks = row.pop("ranks")
    longest = row.pop("max")
    p50, p95, p99 = (float(value) for value in ranks)
    return {**row, "p50": p50, "p95": p95, "p99": p99, "max": float(longest)}


def _messages(found: Figures, messages: DataFrame, archiving: Collection[str]) -> None:
    """Latency and errors: each message counts in its bucket and in the whole."""
    width = found.width * SECOND
    twice = messages.selectExpr(
        *("outcome", "kind", "name", "`group`", "attempt", "reason", "us"),
        f"(us - began) / {SECOND}D as seconds",
        f"explode(array(-1L, us - pmod(us, {width}))) as begins",
    )
    counted = twice.groupBy("outcome", "kind", "name", "group", "begins").agg(
        *_columns("count(*) as messages", "sum(attempt - 1) as retries", "min(us) as first"),
        *_columns("mode(reason, true) as reason", *_SPREAD),
    )
    rows = [_spread(row) for row in _rows(counted, "kind", "name", "group", "outcome", "begins")]
    for row in rows:
        is_all = row["begins"] < 0
        row["period"] = ALL if is_all else BUCKET
        row["at"] = moment(row["first"] if is_all else row["begins"])
        if not is_all and row["outcome"] == "finished":
            found.throughput.append(_rate("queue", row["name"], row["begins"], row["messages"], found.width))
    names = ("kind", "name", "group", "outcome", "period", "messages", "p50", "p95", "p99", "max")
    found.latency = [{"begins": row["at"], **{n: row[n] for n in names}} for row in rows]
    _errors(found, rows, archiving)


def _errors(found: Figures, rows: Rows, archiving: Collection[str]) -> None:
    of_stream = {row["stream"]: row["events"] for row in found.streams}
    start = found.first or moment(0)
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}

    def at(kind: str, name: str, group: str, period: str, begins: datetime) -> dict[str, Any]:
        place = (kind, name, group, period, begins)
        known = 0 if kind == "queue" and name in archiving else None
        events = of_stream.get(name, 0) if kind == "stream" and period == ALL else None
        named = dict(zip(("kind", "name", "group", "period", "begins"), place, strict=True))
        empty = {"dead_letters": 0, "finished": known, "retries": known, "events": events, "reason": None}
        return merged.setdefault(place, {**named, **empty})

    for queue in sorted(archiving):
        at("queue", queue, "", ALL, start)
    for row in rows:
        begins = start if row["period"] == ALL else row["at"]
        one = at(row["kind"], row["name"], row["group"], row["period"], begins)
        if row["outcome"] == "finished":
            one.update(finished=row["messages"], retries=row["retries"])
        else:
            one.update(dead_letters=row["messages"], reason=row["reason"])
    for one in merged.values():
        ended = one["events"] if one["finished"] is None else one["finished"] + one["dead_letters"]
        one["rate"] = one["dead_letters"] / ended if ended else None
    found.errors = [merged[place] for place in sorted(merged)]
