"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Scale:
    """How much is measured: rounds, and seconds of each turn in a round."""

    rounds: int = 5
    publish: int = 3
    consume: float = 1.0
    backlog: int = 200_000
    latency: float = 5.0
    held: float = 180.0
    queue: int = 2
    wide: bool = True  # all combinations of payload, clients and commit
    background: float = 1.0
    queue_held: float = 300.0
    clients: int = 20_000  # messages before a worker
    client_turn: float = 10.0  # ... and how long it has at most
    client_produce: float = 2.0
    client_latency: float = 10.0


@dataclass(frozen=True)
class Options:
    """One run of the benchmarks."""

    scale: Scale
    dsn: str | None
    json: Path | None
    markdown: Path | None


QUICK = Scale(
    rounds=2,
    publish=1,
    consume=0.2,
    backlog=40_000,
    latency=0.8,
    held=1.5,
    queue=1,
    wide=False,
    background=0.3,
    queue_held=6.0,
    clients=5_000,
    client_turn=3.0,
    client_produce=0.5,
    client_latency=2.0,
)
SHORT = Scale(
    publish=2,
    consume=0.7,
    backlog=100_000,
    latency=3.0,
    held=12.0,
    queue=1,
    wide=False,
    background=0.5,
    queue_held=30.0,
    clients=10_000,
    client_turn=5.0,
    client_produce=1.0,
    client_latency=5.0,
)


def parse(description: str, seconds: str | None = None, argv: list[str] | None = None) -> Options:
    """Read the command line; `seconds` names the field of `Scale` that ``--seconds`` sets."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a glance: few rounds, short turns")
    if seconds is None:
        size.add_argument(
            "--full", action="store_true", help="long turns, and snapshots held for 3 and 5 minutes"
        )
    parser.add_argument("--rounds", type=int, help="how often the systems take turns")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, help="length of one turn")
    parser.add_argument("--dsn", help="measure on this server, in a database made for the run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also replace the results in a page such as docs/benchmarks.md",
    )
    given = parser.parse_args(argv)
    scale = QUICK if given.quick else Scale() if seconds is not None or given.full else SHORT
    if given.rounds is not None:
        scale = replace(scale, rounds=max(1, given.rounds))
    if seconds is not None and given.seconds is not None:
        scale = _with_seconds(scale, seconds, given.seconds)
    return Options(scale, given.dsn, given.json, given.markdown)


def _with_seconds(scale: Scale, name: str, seconds: float) -> Scale:
    if name in ("publish", "queue"):
        whole: dict[str, Any] = {name: max(1, round(seconds))}
        return replace(scale, **whole)  # pgbench counts in whole seconds
    changed: dict[str, Any] = {name: seconds}
    return replace(scale, **changed)
