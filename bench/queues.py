"""Queues: send one message per transaction, send a batch, receive and ack with many consumers."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass

from rich.table import Table

from bench import _cpu, _load, _queue_work
from bench._database import Database
from bench._load import Script, Work
from bench._main import single
from bench._options import Options, Scale
from bench._peers import LARGE, PAYLOAD
from bench._queue_work import SYSTEMS, Take
from bench._report import Report, Steps, number
from bench._stats import Line, compare, known, median

PAYLOADS = {"100 B": PAYLOAD, "1 KB": LARGE}
BATCH = 1000
_SEND = {
    "pgmq": "select * from pgmq.send('bench', {}::jsonb)",
    "postbus": "select postbus.send('bench', {}::text)",
}
_SEND_BATCH = {
    "pgmq": "select * from pgmq.send_batch('bench', {}::jsonb[])",
    "postbus": "select postbus.send_batch('bench', {}::text[])",
}
_ARRAY = {"pgmq": "jsonb", "postbus": "text"}
# Messages a second that no system takes on two CPUs, by batch: a backlog must not end before the turn does.
_AHEAD = {1: 25_000, 10: 75_000, 100: 150_000}
_CPUS = max(1, (os.cpu_count() or 1) // 2)
SCALING = (8, 64)


@dataclass(frozen=True)
class Case:
    """One line of the table. backlog: messages that have to be there before, for a second of work."""

    verb: str
    payload: str
    batch: int
    clients: int
    commit: str
    target: float | None
    backlog: int = 0

    @property
    def name(self) -> str:
        """What the table calls it."""
        what = {"send": "send", "send_batch": f"send_batch {self.batch}"}.get(
            self.verb, f"receive {self.batch} + ack"
        )
        who = "consumer" if self.backlog else "client"
        return f"{what}, {self.payload}, {self.clients} {who}{'s' * (self.clients > 1)}, commit {self.commit}"

    def work(self, system: str) -> Work:
        """What each client does."""
        payload = PAYLOADS[self.payload]
        if self.verb == "send":
            return Script(_SEND[system], payload)
        if self.verb == "send_batch":
            load = f"select array_fill('{payload}'::{_ARRAY[system]}, array[{self.batch}])"
            return Script(_SEND_BATCH[system], load=load)
        return Take(system, self.batch)


def cases(scale: Scale) -> list[Case]:
    """What is measured; where time is short, less of it."""
    found = [
        Case("send", payload, 1, clients, commit, 1.8 if commit == "off" else 1.0)
        for payload in PAYLOADS
        for clients in (1, 8)
        for commit in ("off", "on")
        if scale.wide or payload == "100 B"
    ]
    found += [
        Case("send_batch", payload, BATCH, 1, "off", None)
        for payload in PAYLOADS
        if scale.wide or payload == "100 B"
    ]
    for payload in PAYLOADS:
        for batch, backlog in _AHEAD.items():
            for commit in ("off", "on"):
                found += [
                    Case("receive", payload, batch, consumers, commit, 1.2, backlog)
                    for consumers in (1, 4, 16)
                    if (consumers == 4 and payload == "100 B")
                    or (scale.wide and (consumers == 4 or payload == "100 B"))
                ]
    found += [
        Case("receive", "100 B", batch, n, commit, None, _AHEAD[batch])
        for batch in (1, 10)
        for commit in ("off", "on")
        for n in SCALING
        if scale.wide or commit == "off"
    ]
    return found


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Measure every case, the systems in turns."""
    scale = options.scale
    chosen = cases(scale)
    report = Report(
        "Queues",
        {
            **db.settings,
            "payloads": ", ".join(f"{len(payload)} bytes" for payload in PAYLOADS.values()),
            "rounds": str(scale.rounds),
            "seconds a turn": str(scale.queue),
            "load": _load.generator(),
        },
    )
    steps.begin("queue", len(chosen) * scale.rounds * len(SYSTEMS))
    with db.connect() as conn:
        for system in SYSTEMS:
            _queue_work.create(conn, system)
    rates: dict[tuple[Case, str], list[float]] = defaultdict(list)
    per_cpu: dict[tuple[Case, str], list[float | None]] = defaultdict(list)
    for turn in range(scale.rounds):
        for case in chosen:
            for system in SYSTEMS:
                with steps.step(f"{case.name}: {system}, round {turn + 1}"):
                    rate, cpu_rate = _turn(db, case, system, scale.queue)
                rates[case, system].append(rate)
                per_cpu[case, system].append(cpu_rate)
    for case in chosen:
        ours, theirs = rates[case, "postbus"], rates[case, "pgmq"]
        report.lines.append(compare(case.name, ours, theirs, "messages/s", case.target))
    report.lines += _scaling(chosen, rates)
    report.tables.append(_cpu_table(chosen, per_cpu))
    report.details["rates"] = {f"{case.name}: {system}": got for (case, system), got in rates.items()}
    report.details["per CPU second"] = {
        f"{case.name}: {system}": got for (case, system), got in per_cpu.items()
    }
    return report


def _turn(db: Database, case: Case, system: str, seconds: int) -> tuple[float, float | None]:
    """Messages per second, and per second of the server's CPU time where that can be seen."""
    _queue_work.clear(db)
    before = 0
    if case.backlog:
        with db.connect() as conn:
            _queue_work.fill(
                conn, system, case.backlog * _CPUS * (seconds + _load.WARM_UP), PAYLOADS[case.payload]
            )
            conn.execute(f"vacuum analyze {_queue_work.TABLES[system]}".encode())
            before = _queue_work.size(conn, system)
    cpu = _cpu.of_ended_backends(db)
    done = _load.count(
        db.dsn,
        case.work(system),
        clients=case.clients,
        seconds=seconds,
        synchronous_commit=case.commit,
    )
    after = _cpu.of_ended_backends(db)
    messages = done.turns * case.batch
    if case.backlog:
        with db.connect() as conn:
            left = _queue_work.size(conn, system)
        messages = before - left
        if not left:
            raise RuntimeError(f"{case.name}, {system}: the backlog was too small")
    rate = messages / done.turns * done.rate
    return rate, None if cpu is None or after is None or after == cpu else messages / (after - cpu)


def _scaling(chosen: list[Case], rates: dict[tuple[Case, str], list[float]]) -> list[Line]:
    """The most consumers beside few, of one system; no target for the other."""
    lines = []
    few, many = SCALING
    for case in (case for case in chosen if case.backlog and case.clients == many):
        (base,) = (
            c
            for c in chosen
            if c.clients == few and c.backlog and (c.batch, c.commit) == (case.batch, case.commit)
        )
        for system in SYSTEMS:
            name = f"receive {case.batch} + ack, {many} consumers, commit {case.commit}: {system}"
            target = 1.0 if system == "postbus" else None
            lines.append(
                compare(
                    name,
                    rates[case, system],
                    rates[base, system],
                    "messages/s",
                    target,
                    beside=f"{few} consumers",
                )
            )
    return lines


def _cpu_table(chosen: list[Case], per_cpu: dict[tuple[Case, str], list[float | None]]) -> Table:
    table = Table(title="Messages per second of the server's CPU time (medians)", title_justify="left")
    for column in ("case", *SYSTEMS, "ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in chosen:
        figures = [known(per_cpu[case, system]) for system in SYSTEMS]
        if all(figures):
            theirs, ours = map(median, figures)
            table.add_row(case.name, number(theirs), number(ours), f"{ours / theirs:.2f}")
    return table


if __name__ == "__main__":
    single("Queues beside pgmq: send, send_batch, receive and ack.", run, seconds="queue")
