"""Running benchmarks from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench import _report
from bench._database import Database, database
from bench._options import Options, parse
from bench._report import Report, Steps

Benchmark = Callable[[Database, Options, Steps], Report]


def single(description: str, benchmark: Benchmark, *, seconds: str) -> None:
    """Be the command line of one benchmark."""
    run([benchmark], parse(description, seconds))


def run(benchmarks: Iterable[Benchmark], options: Options) -> None:
    """Run the benchmarks one after the other, each on a fresh server, and print what they found."""
    reports: list[Report] = []
    try:
        with _report.steps() as steps:
            for benchmark in benchmarks:
                with database(options.dsn) as db:
                    reports.append(benchmark(db, options, steps))
    finally:
        _report.show(reports)
        if options.json is not None:
            _report.write(options.json, reports)
    if options.markdown is not None:
        _report.write_markdown(options.markdown, reports)
