"""Latency: from the call that publishes to the consumer that has the event; polling, and no ticker."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import defaultdict

import psycopg
from rich.table import Table

from bench._database import Database
from bench._main import single
from bench._options import Options
from bench._peers import PAYLOAD, Pgmq, Postbus, Reader, create_stream
from bench._report import Report, Steps, number
from bench._stats import compare, percentile

RATE = 200
POLL = 0.002
SYSTEMS = ("pgmq", "postbus")
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_WARM_UP = 0.3
_SEND = {
    "pgmq": b"select * from pgmq.send($1, $2::jsonb)",
    "postbus": b"select postbus.publish($1, $2::text)",
}


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Measure both systems in turns."""
    scale = options.scale
    report = Report(
        "Latency",
        {
            **db.settings,
            "synchronous_commit": "off",
            "producers": f"1 at {RATE} events/s",
            "consumers": f"1, polling every {POLL * 1000:g} ms",
            "rounds": str(scale.rounds),
            "seconds a turn": f"{scale.latency:g}",
        },
    )
    steps.begin("latency", scale.rounds * len(SYSTEMS))
    rounds: dict[str, list[list[float]]] = defaultdict(list)
    for turn in range(scale.rounds):
        for system in SYSTEMS:
            with steps.step(f"{system}, round {turn + 1}"):
                rounds[system].append(_turn(db, system, f"latency{turn}", scale.latency))
    for name, share in SHARES.items():
        figures = {s: [percentile(values, share) * 1000 for values in rounds[s]] for s in SYSTEMS}
        target = 1.5 if name == "p50" else None
        case = f"publish to consume, {name}"
        report.lines.append(compare(case, figures["postbus"], figures["pgmq"], "ms", target, at_most=True))
        report.details[name] = figures
    report.tables.append(_table(rounds))
    return report


def _table(rounds: dict[str, list[list[float]]]) -> Table:
    table = Table(title="All rounds together, ms", title_justify="left")
    for column in ("", "events", *SHARES, "highest"):
        table.add_column(column, justify="right")
    for system, turns in rounds.items():
        values = [value * 1000 for turn in turns for value in turn]
        cells = [number(percentile(values, share)) for share in SHARES.values()]
        table.add_row(system, number(len(values)), *cells, number(max(values)))
    return table


def _turn(db: Database, system: str, name: str, seconds: float) -> list[float]:
    """Latencies in seconds, of every event after the warm-up."""
    with db.connect() as conn:
        reader: Reader
        if system == "pgmq":
            conn.execute("select pgmq.create(%s)", [name])
            reader = Pgmq(conn, name)
        else:
            create_stream(conn, name)
            conn.execute("select postbus.create_group(%s, 'bench')", [name])
            reader = Postbus(conn, name, "bench")
        spawn = multiprocessing.get_context("spawn")
        producer = spawn.Process(target=_produce, args=(db.dsn, system, name, seconds))
        producer.start()
        try:
            return _watch(reader, int(RATE * seconds), time.monotonic() + seconds + 30)
        finally:
            producer.join()


def _watch(reader: Reader, wanted: int, deadline: float) -> list[float]:
    """Poll until all events have come."""
    seen: list[float] = []
    while len(seen) < wanted:
        page = reader.read(100)
        now = time.monotonic_ns()
        if page.payloads:
            sent = [json.loads(payload)["sent"] for payload in page.payloads]
            seen += [(now - ns) / 1e9 for ns in sent if ns]
            reader.finish(page)
        elif time.monotonic() > deadline:
            raise RuntimeError(f"{len(seen)} of {wanted} events arrived")
        else:
            time.sleep(POLL)
    return seen


def _produce(dsn: str, system: str, name: str, seconds: float) -> None:
    """Publish on schedule. The clock is the machine's monotonic one, which its processes share."""
    with psycopg.connect(dsn, autocommit=True, options="-c synchronous_commit=off") as conn:
        conn.pgconn.prepare(b"send", _SEND[system])
        fields = json.loads(PAYLOAD)
        warm_up = int(RATE * _WARM_UP)
        start = time.monotonic()
        for i in range(warm_up + int(RATE * seconds)):
            time.sleep(max(0.0, start + i / RATE - time.monotonic()))
            fields["sent"] = time.monotonic_ns() if i >= warm_up else 0
            conn.pgconn.exec_prepared(b"send", [name.encode(), json.dumps(fields).encode()])


if __name__ == "__main__":
    single("Latency beside polling pgmq.", run, seconds="latency")
