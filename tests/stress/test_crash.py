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
from tests.stress.harness import Plan, Stress
from tests.stress.oracle import Lines

ROOT = Path(__file__).parents[2]


class Processes:
    """Worker processes by name; a killed one is started again."""

    def __init__(self, stress: Stress, log: Path) -> None:
        self.stress = stress
        self.log = log
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.ready: set[str] = set()
        self.starts = 0

    def start(self, group: str, ordering: str, name: str) -> None:
        self.starts += 1
        path = self.log / f"{self.starts}-{name}.log"
        path.touch()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(postbus.__file__).parents[1])]),
        }
        self.running[name] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.stress.crasher",
                self.stress.dsn,
                group,
                ordering,
                name,
                str(self.starts),
                path,
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )

    def wait(self, name: str) -> None:
        out = self.running[name].stdout
        assert out is not None
        if name not in self.ready:
            assert out.readline() == "ready\n"
            self.ready.add(name)

    def kill(self, name: str) -> None:
        p = self.running.pop(name)
        self.ready.discard(name)
        p.send_signal(signal.SIGKILL)
        p.communicate()


@pytest.mark.fault
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_workers(db: Database, tmp_path: Path, seed: int) -> None:
    plan = Plan(seed, 3.0, kills=False, workers=1)
    stress = Stress(db.dsn, plan)
    processes = Processes(stress, tmp_path)
    stress.beside = lambda: rage(processes, plan, int(os.environ.get("STRESS_KILLS", "8")))
    try:
        result = stress.run()
    finally:
        for name in list(processes.running):
            processes.kill(name)
    assert not result.violations, f"{result}"


def rage(processes: Processes, plan: Plan, kills: int) -> None:
    """Kill and restart; in the end read what the dead have written."""
    rnd = random.Random(f"{plan.seed}/rage")
    stress = processes.stress
    stress.end = math.inf
    try:
        for group, ordering in plan.groups.items():
            processes.start(group, ordering, f"{group}-9")
        for _ in range(kills):
            name = rnd.choice(list(processes.running))
            processes.wait(name)
            time.sleep(rnd.random() * 0.3)
            processes.kill(name)
            group = name.rsplit("-", 1)[0]
            processes.start(group, plan.groups[group], name)
    finally:
        for name in list(processes.running):
            processes.kill(name)
        stress.end = time.monotonic()
    for path in sorted(processes.log.glob("*.log")):
        Lines.read(path, stress.log)
    for path in processes.log.glob("*.fault"):
        stress.faults.append(path.read_text(encoding="utf-8"))
