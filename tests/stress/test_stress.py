"""The random stress: twenty seeds in `make test`, as many and as long as you like in `make fault`.

A failure names its seed. Run one again, for longer, with:

    STRESS_SEEDS=7 STRESS_SECONDS=30 python -m pytest tests/stress/test_stress.py -m fault
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import Database
from tests.stress.conftest import FreshDatabase
from tests.stress.harness import Plan, Stress

SEEDS = range(1, 21)


def plan(seed: int, seconds: float) -> Plan:
    """Every seed has its own lane counts and segments; all have every kind of group."""
    lanes = [(3, 8, 2), (1, 3, 8), (8, 2), (2, 5, 1)]
    fragile = ["key", "stream", "none"]
    groups = {"total": "stream", "keyed": "key", "free": "none", "fragile": fragile[seed % len(fragile)]}
    return Plan(
        seed,
        seconds,
        lanes=lanes[seed % len(lanes)],
        segments=2 + seed % 3,
        groups=groups,
        straggler=seed % 5 == 0,
    )


def run(db: Database, seed: int, seconds: float) -> None:
    result = Stress(db.dsn, plan(seed, seconds)).run()
    assert not result.violations, (
        f"{result}\nrun it again: STRESS_SEEDS={seed} STRESS_SECONDS={seconds:g}"
        f" python -m pytest tests/stress/test_stress.py -m fault"
    )
    stats = result.stats
    assert stats["published"] > 0
    assert stats["worker deliveries"] >= stats["published"]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_lost_double_or_out_of_order(db: Database, seed: int) -> None:
    run(db, seed, 2.0)


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_for_longer(fresh: FreshDatabase, request: pytest.FixtureRequest) -> None:
    if "fault" not in request.config.option.markexpr and "STRESS_SECONDS" not in os.environ:
        pytest.skip("runs in make fault, or with STRESS_SECONDS")
    seconds = float(os.environ.get("STRESS_SECONDS", "20"))
    for seed in os.environ.get("STRESS_SEEDS", "101,102,103").split(","):
        with fresh() as db:
            run(db, int(seed), seconds)
