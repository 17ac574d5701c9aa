"""Publishing: one event per transaction from 8 clients, and batches of 1,000."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

import psycopg

from bench import _cpu, _load
from bench._database import Database
from bench._load import Script
from bench._main import single
from bench._options import Options
from bench._peers import PAYLOAD, create_stream
from bench._report import Report, Steps
from bench._stats import compare, known

CLIENTS = 8
BATCH = 1000

_TEXTS = f"select array_fill('{PAYLOAD}'::text, array[{BATCH}])"
_JSONS = f"select array_fill('{PAYLOAD}'::jsonb, array[{BATCH}])"

SINGLE = {
    "pgmq": Script("select * from pgmq.send('bench', {}::jsonb)", PAYLOAD),
    "text": Script("select postbus.publish('bench', {}::text)", PAYLOAD),
    "jsonb": Script("select postbus.publish('bench', {}::jsonb)", PAYLOAD),
}
BATCHES = {
    "pgmq": Script("select * from pgmq.send_batch('bench', {}::jsonb[])", load=_JSONS),
    "text": Script("select postbus.publish_batch('bench', {}::text[])", load=_TEXTS),
    "jsonb": Script("select postbus.publish_batch('bench', {}::jsonb[])", load=_JSONS),
}
# name, scripts, clients, synchronous_commit, events a transaction, target
CASES = (
    ("publish {}, synchronous_commit off", SINGLE, CLIENTS, "off", 1, 1.8),
    ("publish {}, synchronous_commit on", SINGLE, CLIENTS, "on", 1, 1.0),
    (f"publish_batch {{}}, {BATCH} events", BATCHES, 1, "off", BATCH, 1.1),
)


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Measure every case, the systems in turns."""
    scale = options.scale
    steps.begin("publish", len(CASES) * scale.rounds * len(SINGLE))
    with db.connect() as conn:
        create_stream(conn, "bench")
        conn.execute("select pgmq.create('bench')")
    report = Report(
        "Publishing",
        {
            **db.settings,
            "clients": str(CLIENTS),
            "batch clients": "1",
            "payload": f"{len(PAYLOAD)} bytes",
            "rounds": str(scale.rounds),
            "seconds a turn": str(scale.publish),
            "load": _load.generator(),
        },
    )
    for case, scripts, clients, commit, events, target in CASES:
        rates: dict[str, list[float]] = defaultdict(list)
        per_cpu: dict[str, list[float | None]] = defaultdict(list)
        for turn in range(scale.rounds):
            _checkpoint(db)
            for name, script in scripts.items():
                with steps.step(f"{case.format(name)}, round {turn + 1}"):
                    cpu = _cpu.of_ended_backends(db)
                    rate = events * _load.run(
                        db.dsn, script, clients=clients, seconds=scale.publish, synchronous_commit=commit
                    )
                    after = _cpu.of_ended_backends(db)
                rates[name].append(rate)
                used = None if cpu is None or after is None else after - cpu
                per_cpu[name].append(rate * scale.publish / used if used else None)
        for name in ("text", "jsonb"):
            wanted = target if name == "text" else None
            report.lines.append(compare(case.format(name), rates[name], rates["pgmq"], "events/s", wanted))
            cpu_rates = known(per_cpu[name]), known(per_cpu["pgmq"])
            if all(cpu_rates):
                report.lines.append(compare(case.format(name), *cpu_rates, "events/CPU s"))
        report.details[case.format("rates")] = rates
    return report


def _checkpoint(db: Database) -> None:
    with db.connect() as conn, suppress(psycopg.errors.InsufficientPrivilege):
        conn.execute("checkpoint")


if __name__ == "__main__":
    single("Publishing beside pgmq.send.", run, seconds="publish")
