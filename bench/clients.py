"""Clients: one worker, one producer and an idle system, beside pgqueuer and procrastinate."""

from __future__ import annotations

from collections import defaultdict
from importlib import metadata
from typing import Any

from psycopg import sql
from rich.table import Table

from bench._clients._contenders import (
    BATCH,
    OURS,
    PEERS,
    PGQUEUER,
    PROCRASTINATE,
    QUEUE,
    RAW_QUEUE,
    RAW_STREAM,
    STREAM,
)
from bench._database import Database
from bench._main import single
from bench._options import Options, Scale
from bench._peers import PAYLOAD
from bench._report import Report, Steps, number
from bench._stats import Line, compare, percentile

PACE = 20
SHARES = {"p50": 0.5, "p95": 0.95}
WORKERS = (*PEERS, *OURS)
PRODUCERS = (*PEERS, QUEUE, RAW_QUEUE, STREAM, RAW_STREAM)

Figures = dict[str, list[float]]
Chosen = dict[str, dict[str, Any]]


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Find the best settings of each client, then let all take turns."""
    scale = options.scale
    report = Report("Clients", _settings(db, scale))
    tries = _tries(scale) * sum(len(c.variants) for c in WORKERS)
    steps.begin("clients", tries + scale.rounds * (2 * len(WORKERS) + len(PRODUCERS)))
    with db.connect() as conn:
        name = sql.Identifier(conn.info.dbname)
        conn.execute(sql.SQL("alter database {} set synchronous_commit = off").format(name))
    for contender in PEERS:
        contender.do("install", db, {})
    chosen = _choose(db, scale, steps, report)
    workers: Figures = defaultdict(list)
    producers: Figures = defaultdict(list)
    latencies: dict[str, list[list[float]]] = defaultdict(list)
    for turn in range(scale.rounds):
        for c in WORKERS:
            with steps.step(f"worker: {c.name}, round {turn + 1}"):
                workers[c.name].append(c.work(db, chosen[c.name], scale.clients, scale.client_turn))
        for c in PRODUCERS:
            with steps.step(f"producer: {c.name}, round {turn + 1}"):
                producers[c.name].append(c.produce(db, chosen[c.name], scale.client_produce))
        for c in WORKERS:
            with steps.step(f"latency: {c.name}, round {turn + 1}"):
                latencies[c.name].append(c.latencies(db, chosen[c.name], PACE, scale.client_latency))
    report.lines += [*_worker_lines(workers), *_producer_lines(producers), *_latency_lines(latencies)]
    report.details |= {"settings": chosen, "workers": workers, "producers": producers, "latencies": latencies}
    return report


def _settings(db: Database, scale: Scale) -> dict[str, str]:
    return {
        **{name: value for name, value in db.settings.items() if name != "pgmq"},
        **{name: metadata.version(name) for name in (c.name for c in PEERS)},
        "synchronous_commit": "off",
        "messages before a worker": ", ".join(f"{c.name} {scale.clients * c.times:,}" for c in WORKERS),
        "payload": f"{len(PAYLOAD)} bytes",
        "batches": f"{BATCH:,}",
        "pace": f"{PACE} messages/s for {scale.client_latency:g} s",
        "rounds": str(scale.rounds),
    }


def _choose(db: Database, scale: Scale, steps: Steps, report: Report) -> Chosen:
    """The settings of each client with which its worker is fastest, of those it is tried with."""
    chosen: Chosen = {c.name: c.variants[0] for c in PRODUCERS}
    table = Table(title="Settings that were tried, messages/s; the best is measured", title_justify="left")
    for column in ("", "settings", "messages/s"):
        table.add_column(column, justify="right" if column == "messages/s" else "left")
    for c in WORKERS:
        rates = [0.0] * len(c.variants)
        for _ in range(_tries(scale)):
            for i, variant in enumerate(c.variants):
                with steps.step(f"settings: {c.name} {_say(variant)}"):
                    rates[i] = max(rates[i], c.work(db, variant, scale.clients, scale.client_turn / 2))
        best = rates.index(max(rates))
        chosen[c.name] = c.variants[best]
        for i, (variant, rate) in enumerate(zip(c.variants, rates, strict=True)):
            style = "bold" if i == best else ""
            table.add_row(c.name, _say(variant), number(rate), style=style)
        table.add_section()
        report.notes.append(f"- {c.name}: {_say(chosen[c.name])}")
    report.tables.append(table)
    return chosen


def _tries(scale: Scale) -> int:
    """One bad moment must not decide, where there is time for two."""
    return 2 if scale.wide else 1


def _say(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name != "kind")


def _worker_lines(rates: Figures) -> list[Line]:
    targets = {(QUEUE, PGQUEUER): 2.0, (QUEUE, PROCRASTINATE): 5.0, (STREAM, PGQUEUER): 5.0}
    return [
        compare(
            f"worker, {ours.name}",
            rates[ours.name],
            rates[peer.name],
            "messages/s",
            targets.get((ours, peer)),
            beside=peer.name,
        )
        for ours in OURS
        for peer in PEERS
    ]


def _producer_lines(rates: Figures) -> list[Line]:
    lines = []
    for ours, raw, case in ((QUEUE, RAW_QUEUE, "send_batch"), (STREAM, RAW_STREAM, "publish_batch")):
        for peer, target, beside in ((raw, 0.8, "SQL"), *((p, None, p.name) for p in PEERS)):
            lines.append(
                compare(
                    f"{case}, {BATCH:,}",
                    rates[ours.name],
                    rates[peer.name],
                    "messages/s",
                    target,
                    beside=beside,
                )
            )
    return lines


def _latency_lines(rounds: dict[str, list[list[float]]]) -> list[Line]:
    lines = []
    for name, share in SHARES.items():
        figures = {c.name: [percentile(turn, share) * 1000 for turn in rounds[c.name]] for c in WORKERS}
        for ours, verb in ((QUEUE, "send"), (STREAM, "publish")):
            for peer in PEERS:
                target = 1.0 if name == "p50" and ours is QUEUE else None
                lines.append(
                    compare(
                        f"{verb} to handler, {name}",
                        figures[ours.name],
                        figures[peer.name],
                        "ms",
                        target,
                        at_most=True,
                        beside=peer.name,
                    )
                )
    return lines


if __name__ == "__main__":
    single("Clients beside pgqueuer and procrastinate.", run, seconds="client_latency")
