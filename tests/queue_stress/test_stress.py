"""The random stress of queues: some seeds in `make test`, as many and as long as you like in `make fault`.

A failure names its seed. Run one again, for longer, with:

    STRESS_SEEDS=7 STRESS_SECONDS=30 python -m pytest tests/queue_stress/test_stress.py -m fault
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import Database
from tests.queue_stress.harness import Plan, Stress
from tests.stress.conftest import FreshDatabase

SEEDS = range(1, 9)


def plan(seed: int, seconds: float) -> Plan:
    leases = [(0.08, 0.3, 1.0), (0.05, 0.1), (0.3, 1.0)]
    return Plan(seed, seconds, leases=leases[seed % 3], old_snapshot=seed % 2 == 0, kills=seed % 4 != 0)


def run(db: Database, seed: int, seconds: float) -> None:
    result = Stress(db.dsn, plan(seed, seconds)).run()
    assert not result.violations, (
        f"{result}\nrun it again: STRESS_SEEDS={seed} STRESS_SECONDS={seconds:g}"
        f" python -m pytest tests/queue_stress/test_stress.py -m fault"
    )
    stats = result.stats
    for what in ["sent", "delivered", "worker late receipts", "worker transactional", "meddler policies"]:
        assert stats[what] > 0, f"nothing {what}: {stats}"


@pytest.mark.parametrize("seed", SEEDS)
def test_one_owner_limits_order_and_nothing_lost(db: Database, seed: int) -> None:
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
