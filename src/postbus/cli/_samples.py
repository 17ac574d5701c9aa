"""What ``postbus top`` reads: the figures of one moment, and how they change from one to the next."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psycopg

from postbus.cli._connect import rows
from postbus.engine import Connection

Row = dict[str, Any]

# Rates are taken over so many samples: the server brings some of its counters up to date once a second only.
_WINDOW = 5
# Findings do not change every second, and cost more than figures.
_FINDINGS_SECONDS = 10.0
# The label of figures of all queues together.
_ALL = "*"

_SERVER = """
select clock_timestamp() as at, current_setting('server_version') as version, current_database() as database,
  count(*) filter (where datid is not null and coalesce(backend_type, 'client backend') = 'client backend')
    as connections,
  current_setting('max_connections')::int as max_connections,
  coalesce(max(extract(epoch from clock_timestamp() - xact_start))
    filter (where backend_xmin is not null and pid <> pg_backend_pid()), 0)::float8 as oldest_snapshot_seconds
from pg_stat_activity
"""


@dataclass
class Sample:
    """The figures of one moment. Rates are None while there is no earlier one to compare with."""

    at: datetime
    server: Row
    queues: dict[str, Row] = field(default_factory=lambda: defaultdict(dict))
    streams: dict[str, Row] = field(default_factory=lambda: defaultdict(dict))
    groups: dict[tuple[str, str], Row] = field(default_factory=lambda: defaultdict(dict))
    totals: Row = field(default_factory=dict)
    findings: list[Row] = field(default_factory=list)
    clock: float = field(default_factory=time.monotonic)

    def put(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Take up one figure of ``postbus.metrics()``."""
        figure = name.rpartition(".")[2]
        number = int(value) if value == int(value) else value
        match labels:
            case {"stream": stream, "group": group}:
                self.groups[stream, group][figure] = number
            case {"stream": stream}:
                self.streams[stream][figure] = number
            case {"queue": queue} if queue == _ALL:
                self.totals[figure] = number
            case {"queue": queue}:
                self.queues[queue][figure] = number

    def as_json(self) -> Row:
        """One object, with the names inside the rows."""
        return {
            "at": self.at.astimezone(UTC).isoformat(),
            "server": self.server,
            "totals": self.totals,
            "queues": [{"queue": name, **row} for name, row in self.queues.items()],
            "streams": [{"stream": name, **row} for name, row in self.streams.items()],
            "groups": [
                {"stream": stream, "group": group, **row} for (stream, group), row in self.groups.items()
            ],
            "findings": self.findings,
        }


class Sampler:
    """Reads samples, and remembers enough of them for rates and sparklines.

    Example:
        >>> sampler = Sampler(keep=60)  # doctest: +SKIP
        >>> sampler.read(conn).queues["emails"]["change_per_second"]  # doctest: +SKIP
    """

    def __init__(self, keep: int) -> None:
        self.past: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=keep))
        self._window: deque[Sample] = deque(maxlen=_WINDOW + 1)
        self._findings: list[Row] = []
        self._looked = float("-inf")

    def read(self, conn: Connection) -> Sample:
        """Take a sample, with rates against the earlier ones."""
        [server] = rows(conn, _SERVER)
        where = {"host": conn.info.host, "port": conn.info.port}
        sample = Sample(at=server.pop("at"), server=where | server)
        for name, value, labels in conn.execute("select name, value, labels from postbus.metrics()"):
            sample.put(name, value, labels)
        sample.findings = self._health(conn)
        self._window.append(sample)
        self._compare(sample, self._window[0])
        return sample

    def forget(self) -> None:
        """Begin anew: a server that was restarted may have begun to count again."""
        self._window.clear()

    def _health(self, conn: Connection) -> list[Row]:
        if time.monotonic() > self._looked + _FINDINGS_SECONDS:
            try:
                self._findings = rows(conn, "select * from postbus.health()")
            except psycopg.errors.InsufficientPrivilege:
                self._findings = []
            self._looked = time.monotonic()
        return self._findings

    def _compare(self, new: Sample, old: Sample) -> None:
        seconds = new.clock - old.clock

        def rate(now: Row, before: Row | None, figure: str) -> float | None:
            if not before or seconds <= 0:
                return None
            return float(now.get(figure, 0) - before.get(figure, 0)) / seconds

        def growth(now: Row, before: Row | None, figure: str) -> float | None:
            found = rate(now, before, figure)
            return None if found is None else max(0.0, found)

        new.totals["in_per_second"] = growth(new.totals, old.totals, "sent_total")
        new.totals["out_per_second"] = growth(new.totals, old.totals, "finished_total")
        for queue, row in new.queues.items():
            row["change_per_second"] = rate(row, old.queues.get(queue), "depth")
            self.past[queue].append(row["depth"])
        for stream, row in new.streams.items():
            row["in_per_second"] = growth(row, old.streams.get(stream), "sent_total")
            self.past[stream].append(row["in_per_second"] or 0)
        for (stream, group), row in new.groups.items():
            # What was published and does not wait any more was taken.
            row["taken"] = new.streams[stream].get("sent_total", 0) - row["pending_events"]
            row["out_per_second"] = growth(row, old.groups.get((stream, group)), "taken")
            self.past[stream, group].append(row["pending_events"])
