"""Spark: source, sink and archive of Postbus beside Spark's JDBC reader and writer and plain Parquet."""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module, metadata
from pathlib import Path

from bench._database import _SETTINGS, Database
from bench._main import run as run_all
from bench._options import QUICK, Options, Scale
from bench._report import Report, Steps, number
from bench._spark import _data, _jdbc
from bench._spark._jobs import STREAM, Job, Plan, Spark
from bench._stats import Line, compare, median

MEMORY = "2g"
BATCHES = (1_000, 10_000, 50_000)  # of the JDBC writer: the best is measured
FETCHES = (1_000, 10_000, 50_000)


def run(db: Database, options: Options, steps: Steps, plan: Plan) -> Report:
    """Warm up once, then let the contenders take turns."""
    from postbus.spark import session

    config = {"spark.driver.extraClassPath": str(plan.jdbc), "spark.sql.shuffle.partitions": str(plan.tasks)}
    with tempfile.TemporaryDirectory() as folder:
        spark = session("bench", master=f"local[{plan.tasks}]", memory=MEMORY, config=config)
        try:
            bench = Spark(db, plan, Path(folder), spark)
            report = Report("Spark", _settings(db, plan, options.scale))
            return (_flat if plan.flat else _beside)(bench, options.scale, steps, report)
        finally:
            spark.stop()


def _beside(bench: Spark, scale: Scale, steps: Steps, report: Report) -> Report:
    plan = bench.plan
    jobs = _jobs(bench)
    steps.begin("spark", 1 + len(BATCHES) + len(FETCHES) + (scale.rounds + 1) * len(jobs))
    with steps.step(f"{plan.rows:,} rows"):
        _data.fill(bench.conn, STREAM, plan.rows)
    _choose(bench, steps, report)
    for turn in range(scale.rounds + 1):
        for job in jobs.values():
            with steps.step(f"{job.name}, {f'round {turn}' if turn else 'warm-up'}"):
                bench.turn(job, keep=turn > 0)
    for ours, theirs, target in _pairs(plan):
        if ours in jobs:
            report.lines += _lines(jobs[ours], jobs[theirs], target)
        else:
            report.notes.append(f"- {ours}: not measured, this version has no lake sink.")
    report.notes += _table(list(jobs.values()))
    report.details |= {
        j.name: {"seconds": j.seconds, "usage": [asdict(u) for u in j.usage]} for j in jobs.values()
    }
    return report


def _pairs(plan: Plan) -> list[tuple[str, str, float]]:
    """Who is compared with whom, and the ratio that is wanted."""
    pairs = [
        ("source, noop", "JDBC, noop", 0.8),
        ("source, Parquet", "JDBC, Parquet", 0.8),
        ("sink", "JDBC, bare table", 1.2),
        ("sink", "JDBC, table with id", 1.2),
        ("archive, Delta", "source, Parquet", 0.5),
    ]
    return [pair for pair in pairs if pair[0].startswith(plan.only)]


def _jobs(bench: Spark) -> dict[str, Job]:
    runs: dict[str, Callable[[], None]] = {
        "source, noop": lambda: bench.to_noop(bench.source()),
        "JDBC, noop": lambda: bench.to_noop(bench.plain()),
        "source, Parquet": lambda: bench.to_parquet(bench.source()),
        "JDBC, Parquet": lambda: bench.to_parquet(bench.plain()),
        "sink": bench.to_stream,
        "JDBC, bare table": lambda: bench.to_table("out_bare"),
        "JDBC, table with id": lambda: bench.to_table("out_keyed"),
    }
    if _has_lake():
        runs["archive, Delta"] = lambda: bench.to_lake(bench.source())
    wanted = {name for pair in _pairs(bench.plan) for name in pair[:2]}
    return {name: Job(name, bench.plan.rows, work, [], []) for name, work in runs.items() if name in wanted}


def _choose(bench: Spark, steps: Steps, report: Report) -> None:
    """The sizes with which JDBC is fastest, of those it is tried with."""
    best: dict[str, tuple[float, int]] = {}
    for name, sizes in (("fetch", FETCHES), ("batch", BATCHES)):
        for size in sizes:
            setattr(bench.jdbc, name, size)
            work = (
                (lambda: bench.to_noop(bench.plain()))
                if name == "fetch"
                else lambda: bench.to_table("out_bare")
            )
            job = Job(name, bench.plan.rows, work, [], [])
            with steps.step(f"JDBC, {name} size {size:,}"):
                bench.turn(job, keep=False)
                bench.turn(job)
            best[name] = max(best.get(name, (0.0, 0)), (job.rates[0], size))
        setattr(bench.jdbc, name, best[name][1])
    report.settings |= {f"JDBC {name} size": f"{size:,}" for name, (_, size) in best.items()}


def _flat(bench: Spark, scale: Scale, steps: Steps, report: Report) -> Report:
    """The same work with more rows: cost per row and memory must not grow."""
    sizes = bench.plan.flat
    steps.begin("spark, flat", len(sizes) * 5)
    done: dict[str, dict[int, Job]] = defaultdict(dict)
    for rows in sizes:
        stream = f"{STREAM}_{rows}"
        with steps.step(f"{rows:,} rows"):
            _data.fill(bench.conn, stream, rows)
        runs: dict[str, Callable[[], None]] = {
            "source, noop": lambda s=stream: bench.to_noop(bench.source(s)),  # type: ignore[misc]
            "source, Parquet": lambda s=stream: bench.to_parquet(bench.source(s)),  # type: ignore[misc]
            "sink": lambda n=rows: bench.to_stream(n),  # type: ignore[misc]
        }
        if _has_lake():
            runs["archive, Delta"] = lambda s=stream: bench.to_lake(bench.source(s))  # type: ignore[misc]
        for name, work in runs.items():
            job = done[name][rows] = Job(f"{name}, {rows:,}", rows, work, [], [])
            with steps.step(job.name):
                if rows == sizes[0]:
                    bench.turn(job, keep=False)
                bench.turn(job)
    first, last = sizes[0], sizes[-1]
    for name, jobs in done.items():
        beside = f"{first:,} rows"
        report.lines.append(
            compare(
                f"{name}, CPU at {last:,} rows", jobs[last].cpus, jobs[first].cpus, "s/million rows", 1.2,
                at_most=True, beside=beside,
            )
        )  # fmt: skip
    report.notes += _table([j for jobs in done.values() for j in jobs.values()])
    report.title = "Spark, from few to many rows"
    return report


def _lines(ours: Job, theirs: Job, target: float) -> list[Line]:
    case = f"{ours.name} beside {theirs.name}"
    cpu = compare(f"{case}, CPU", ours.cpus, theirs.cpus, "s/million rows", beside=theirs.name)
    rates = compare(case, ours.rates, theirs.rates, "rows/s", target, beside=theirs.name)
    return [rates, *([cpu] if cpu.theirs else [])]


def _table(jobs: list[Job]) -> list[str]:
    """Medians, as rows of a page."""
    heads = (
        "job | rows/s | CPU s per million rows | JVM | Python | server | peak MB: JVM | a worker | a backend"
    )
    lines = ["", f"| {heads} |", "|---|" + "---:|" * 8]
    for job in jobs:
        per = 1e6 / job.rows
        cells = [number(median(job.rates)), f"{median(job.cpus):.2f}"]
        cells += [
            f"{median([getattr(u, k) * per for u in job.usage]):.2f}" for k in ("jvm", "python", "server")
        ]
        peaks = ("jvm_peak", "python_peak", "server_peak")
        cells += [f"{max(getattr(u, k) for u in job.usage):,.0f}" for k in peaks]
        lines.append(f"| {' | '.join([job.name, *cells])} |")
    return lines


def _settings(db: Database, plan: Plan, scale: Scale) -> dict[str, str]:
    return {
        **{name: value for name, value in db.settings.items() if name != "pgmq"},
        "Spark": f"{metadata.version('pyspark')}, local[{plan.tasks}], {MEMORY}",
        "rows": ", ".join(f"{n:,}" for n in (plan.flat or (plan.rows,))),
        "payload": "about 100 bytes, with type and key",
        "tasks": str(plan.tasks),
        "rounds": "1" if plan.flat else str(scale.rounds),
    }


def _has_lake() -> bool:
    try:
        import_module("postbus.spark._lake_sink")
    except ImportError:
        return False
    return True


def main() -> None:
    """Be the command line."""
    from postbus.embedded import Server

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a glance: 200,000 rows, two rounds")
    parser.add_argument("--flat", action="store_true", help="1, 5 and 20 million rows, each once")
    parser.add_argument("--only", default="", metavar="CASE", help="source, sink or archive; all by default")
    parser.add_argument("--rows", type=int, default=5_000_000, help="how many rows a job has")
    parser.add_argument("--tasks", type=int, default=2, help="tasks, and cores of the session")
    parser.add_argument("--rounds", type=int, default=5, help="how often the contenders take turns")
    parser.add_argument("--jdbc", type=Path, metavar="JAR", help=f"the JDBC driver, else {_jdbc.DEBIAN}")
    parser.add_argument("--dsn", help="measure on this server (with TCP), in a database made for the run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    given = parser.parse_args()
    flat = ((100_000, 200_000) if given.quick else (1_000_000, 5_000_000, 20_000_000)) if given.flat else ()
    rows = 200_000 if given.quick else given.rows
    plan = Plan(rows, given.tasks, flat, _jdbc.jar(given.jdbc), given.only)
    scale = QUICK if given.quick else Scale(rounds=given.rounds)

    def benchmark(db: Database, options: Options, steps: Steps) -> Report:
        return run(db, options, steps, plan)

    def measure(dsn: str) -> None:
        run_all([benchmark], Options(scale, dsn, given.json, given.markdown))

    if given.dsn:
        measure(given.dsn)
    else:
        # Over TCP, all contenders: JDBC knows no Unix sockets.
        with Server.temporary(settings=_SETTINGS, port=0) as server:
            measure(server.tcp_dsn)


if __name__ == "__main__":
    main()
