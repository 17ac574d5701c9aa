"""kill -9 of worker processes, restarted under the same name, while producers and upkeep go on."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import postbus
from tests.conftest import Database
from tests.queue_stress.harness import Plan, Stress

ROOT = Path(__file__).parents[2]


class Processes:
    """Worker processes by name; a killed one is started again."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.starts = 0

    def start(self, queue: str) -> None:
        self.starts += 1
        path = os.pathsep.join([str(ROOT), str(Path(postbus.__file__).parents[1])])
        command = ["-m", "tests.queue_stress.crasher", self.dsn, queue, f"{queue}-9", str(self.starts)]
        self.running[queue] = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )

    def wait(self, queue: str) -> None:
        out = self.running[queue].stdout
        assert out is not None
        assert out.readline() == "ready\n"

    def kill(self, queue: str) -> None:
        p = self.running.pop(queue)
        p.send_signal(signal.SIGKILL)
        p.communicate()


@pytest.mark.fault
def test_killed_workers(db: Database) -> None:
    plan = Plan(1, kills=False)
    plan.workers = dict.fromkeys(plan.queues, 1)
    stress = Stress(db.dsn, plan)
    processes = Processes(db.dsn)
    stress.beside = lambda: rage(stress, processes, int(os.environ.get("STRESS_KILLS", "6")))
    try:
        result = stress.run()
    finally:
        for queue in list(processes.running):
            processes.kill(queue)
    assert not result.violations, f"{result}"


def rage(stress: Stress, processes: Processes, kills: int) -> None:
    """Kill and restart: every process works for a while before it dies."""
    rnd = random.Random(f"{stress.plan.seed}/rage")
    stress.end = math.inf
    queues = [rnd.choice(stress.plan.queues) for _ in range(kills - 2)] + ["keyed", "plain"]
    try:
        for i, queue in enumerate(queues):
            if queue in processes.running:
                processes.kill(queue)
            processes.start(queue)
            processes.wait(queue)
            time.sleep(0.1 + rnd.random() * 0.3)
            if i % 2:
                processes.kill(queue)
    finally:
        for queue in list(processes.running):
            processes.kill(queue)
        stress.end = time.monotonic()
