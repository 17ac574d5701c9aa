"""Consuming: one consumer works off a backlog, in pages of 100 and of 10."""

from __future__ import annotations

from collections import defaultdict

from bench import _backlog
from bench._backlog import ORDERINGS, PAGES, SIDES, Rate
from bench._database import Database
from bench._main import single
from bench._options import Options
from bench._peers import PAYLOAD
from bench._report import Report, Steps
from bench._stats import compare, known

TARGETS = {100: 3.0, 10: 1.5}
Rates = dict[tuple[int, str, str], list[Rate]]


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Measure both page sizes from a client and inside the server, the systems in turns."""
    scale = options.scale
    report = Report(
        "Consuming",
        {
            **db.settings,
            "synchronous_commit": "off",
            "consumers": "1",
            "backlog": f"{scale.backlog:,}",
            "payload": f"{len(PAYLOAD)} bytes",
            "rounds": str(scale.rounds),
            "seconds a turn": f"{scale.consume:g}",
            "client": "libpq, prepared, text results",
        },
    )
    rates: Rates = defaultdict(list)
    steps.begin("consume", scale.rounds * (1 + len(PAGES) * len(SIDES) * (1 + len(ORDERINGS))))
    for turn in range(scale.rounds):
        name = f"b{turn}"
        with steps.step(f"backlog of {scale.backlog:,}, round {turn + 1}"), db.connect() as conn:
            _backlog.fill(conn, name, scale.backlog)
        for page in PAGES:
            for side in SIDES:
                for system in ("pgmq", *ORDERINGS):
                    what = f"pages of {page}, {side}: {system}, round {turn + 1}"
                    with steps.step(what), db.connect() as conn:
                        rate = _backlog.drain(conn, name, system, side=side, page=page, seconds=scale.consume)
                    rates[page, side, system].append(rate)
        with db.connect() as conn:
            _backlog.empty(conn, name)
    _add(report, rates)
    return report


def _add(report: Report, rates: Rates) -> None:
    for page in PAGES:
        for side in SIDES:
            for ordering in ORDERINGS:
                ours, theirs = rates[page, side, ordering], rates[page, side, "pgmq"]
                name = f"pages of {page}, {side}, {ordering}"
                target = TARGETS[page] if side == "client" and ordering == "key" else None
                wall = [rate.wall for rate in ours], [rate.wall for rate in theirs]
                report.lines.append(compare(name, *wall, "events/s", target))
                cpu = known(rate.cpu for rate in ours), known(rate.cpu for rate in theirs)
                if ordering == "key" and all(cpu):
                    report.lines.append(compare(name, *cpu, "events/CPU s"))
    report.details["rates"] = {
        f"pages of {page}, {side}, {name}": [rate.wall for rate in values]
        for (page, side, name), values in rates.items()
    }


if __name__ == "__main__":
    single("Consuming beside pgmq.read and pgmq.delete.", run, seconds="consume")
