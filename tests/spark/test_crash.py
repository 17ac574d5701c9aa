"""Drivers, executors, workers and backends are killed in the middle of their work, again and again.

Producers and upkeep go on. Then the queries drain, and what each has written is what was committed: nothing
lost, nothing twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Database
from tests.spark.cluster import SETTINGS, Cluster, driver, until
from tests.spark.crash import (
    GROUPS,
    TABLE,
    Plant,
    add_group,
    batches,
    compare,
    end_backends,
    lake_rows,
    pending,
    truth,
    written,
)
from tests.spark.lake import Bench
from tests.stress.sessions import Connection, publish, take, value
from tests.windows.reading import position, window

pytestmark = [pytest.mark.slow, pytest.mark.fault]
LONG = bool(os.environ.get("POSTBUS_FAULT_LONG"))  # make fault
KINDS = ["driver", "executor", "worker", "backends"]
QUERIES = list(GROUPS)
PATIENCE = 400.0  # seconds, on a busy machine too


class Show:
    """Queries on a cluster, and somebody who kills."""

    def __init__(self, cluster: Cluster, c: Connection, dsn: str, out: Path, rnd: random.Random) -> None:
        self.cluster = cluster
        self.c = c
        self.out = out
        self.rnd = rnd
        self.job: dict[str, Any] = {
            "master": cluster.url, "config": SETTINGS, "dsn": dsn, "out": str(out), "do": QUERIES,
        }  # fmt: skip
        self._stack = ExitStack()
        self.process: subprocess.Popen[str] | None = None

    def start(self, most: int) -> None:
        """A driver that takes at most so many events into a micro-batch."""
        self._stack.close()
        self.process = self._stack.enter_context(driver({**self.job, "max": most}, self.cluster.env))

    def close(self) -> None:
        self._stack.close()

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Wait for something that the driver does."""
        process = self.process
        assert process is not None
        try:
            until(lambda: process.poll() is not None or true(), what, PATIENCE)
            assert process.poll() is None, "the driver has ended"
        except AssertionError as exc:
            process.send_signal(signal.SIGUSR1)  # it says where it is
            time.sleep(1)
            raise AssertionError(f"{exc}\n{(self.out / 'driver.log').read_text()[-9000:]}") from None

    def wait_for_batches(self, what: str, more: int) -> None:
        n = batches(self.out, what) + more
        self.until(lambda: batches(self.out, what) >= n, f"batch {n} of {what}")

    def drain(self) -> None:
        self.until(lambda: not any(pending(self.c, GROUPS[what]) for what in QUERIES), "the end")

    def kill(self, kind: str, most: int) -> None:
        """In the middle of a batch, most likely."""
        self.wait_for_batches(self.rnd.choice(QUERIES), self.rnd.randint(1, 3))
        time.sleep(self.rnd.random() * 0.5)
        if kind == "driver":
            assert self.process is not None
            os.killpg(self.process.pid, signal.SIGKILL)
            self.start(most)
        elif kind == "executor":
            self.cluster.kill_executor(self.rnd.randrange(2))
        elif kind == "worker":
            self.cluster.kill_worker(self.rnd.randrange(2))
            self.cluster.start_worker()
        else:
            assert end_backends(self.c) > 0


@pytest.mark.timeout(3600 if LONG else 1200)
def test_kill_everything(cluster: Cluster, db: Database, tmp_path: Path) -> None:
    seed = random.randrange(1000) if LONG else 5
    rnd = random.Random(seed)
    kinds = KINDS * (3 if LONG else 1)
    rnd.shuffle(kinds)
    c = db.connect(application_name="stress main")
    plant = Plant(db.dsn, seed)
    show = Show(cluster, c, db.dsn, tmp_path, rnd)
    try:
        with plant.running():
            show.start(rnd.choice([50, 500]))
            for n, kind in enumerate(kinds):
                # The last driver drains: it may take more at once.
                show.kill(kind, rnd.choice([50, 500]) if "driver" in kinds[n + 1 :] else 5000)
                if n == len(kinds) // 2:
                    add_group(c, "late", "latest")
                    since = position(c, holder="test")
            for what in QUERIES:
                show.wait_for_batches(what, 1)
        show.drain()
    finally:
        show.close()
    wanted = truth(c)
    assert len(wanted) > 500
    for what in QUERIES:
        if what == "mirror":
            rows = [(r["id"], r["n"], r["who"]) for r in lake_rows(db.dsn, tmp_path, what)]
            assert sorted(rows) == c.execute(f"select * from {TABLE} order by id").fetchall()
        else:
            compare(written(c, db.dsn, tmp_path, what), wanted)
    assert plant.done["rotate"] > 0
    assert plant.done["clean"] > 0
    # A group that has read nothing was in nobody's way, and what it has not read is still there.
    kept = window(c, since, position(c))
    held = take(c, by="late")
    assert len(set(held)) == len(held)
    assert set(kept) <= set(held)
    assert len(kept) > 50
    # Now nobody holds it back any more.
    before = plant.done["clean"]
    publish(c, "the end")
    until(lambda: plant.done["clean"] > before, "truncation")
    plant.close()


@pytest.mark.timeout(300)
def test_what_a_query_has_not_read_is_kept(bench: Bench, tmp_path: Path) -> None:
    """Two streams that retain nothing: one has a query's group, the other has none."""
    for name in ("followed", "free"):
        bench.stream(name, retain=0, rotate_every="10 milliseconds", segments=3)
    bench.c.execute(
        """select postbus.create_group('followed', 'lake', '{"start": "earliest", "ordering": "stream"}')"""
    )
    options = {"subscribe": "followed", "startingOffsets": "earliest", "group": "lake"}

    def turn(first: int) -> None:
        for i in range(first, first + 4):
            for name in ("followed", "free"):
                bench.fill(1, to=name, first=i)
            time.sleep(0.015)
            bench.c.execute("select * from postbus.maintain()")

    def kept(name: str) -> list[int]:
        events = window(bench.c, position(bench.c, "earliest", of=name), position(bench.c, of=name), of=name)
        return sorted(json.loads(e)["n"] for e in events)

    def gone(name: str, n: int) -> bool:
        bench.c.execute("select * from postbus.maintain()")
        return n not in kept(name)

    turn(1)
    bench.drain(tmp_path, **options)
    turn(5)
    until(lambda: gone("free", 8), "truncation of what nobody waits for")
    assert kept("followed")[-4:] == [5, 6, 7, 8]
    bench.drain(tmp_path, **options)
    assert bench.written(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    bench.drain(tmp_path, **options)  # the last batch of such a run counts as done when the next one begins
    until(lambda: gone("followed", 8), "truncation of what was read")
    turn(9)
    assert value(bench.c, "select pending from postbus.list_groups()") == 4
    assert kept("followed") == [9, 10, 11, 12]
