"""The driver is killed in the middle of its work, again and again, while producers and upkeep go on.

Then the query drains, and what is in the lake is what was committed: nothing lost, nothing twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Database
from tests.stress.actors import SETUP, SHARED_KEYS, STREAM, Producer, connect
from tests.stress.harness import create_stream
from tests.stress.sessions import Connection, value
from tests.windows.reading import position, window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(600)]
LONG = bool(os.environ.get("POSTBUS_FAULT_LONG"))  # make fault
ROOT = Path(__file__).parents[2]


class Plant:
    """Producers and upkeep, in threads, on one stream."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        with connect(dsn, "setup") as c:
            c.execute(SETUP)
            create_stream(c, lanes=3, segments=3)
            c.execute("select postbus.create_stream('copy')")
            c.execute(
                """select postbus.create_group('s', 'spark', '{"start": "earliest", "ordering": "stream"}')"""
            )
            names = [f"k{i}" for i in range(SHARED_KEYS)] + [f"p2-0-{j}" for j in range(5)]
            c.execute("insert into counter select unnest(%s::text[])", [names])
        self.producers = [Producer(dsn, f"p{i}", seed) for i in range(2)]
        self.producers.append(Producer(dsn, "p2-0", seed, two_phase=True))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Producers stop with the block, upkeep goes on until the end."""
        stop = threading.Event()
        writers = [
            threading.Thread(target=self._produce, args=[p, stop], daemon=True) for p in self.producers
        ]
        self.upkeep = threading.Thread(target=self._maintain, daemon=True)
        for t in [*writers, self.upkeep]:
            t.start()
        try:
            yield
        finally:
            stop.set()
            for t in writers:
                t.join(30)

    def close(self) -> None:
        self.over.set()
        self.upkeep.join(30)
        assert not self.faults, self.faults[0]

    def _produce(self, p: Producer, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                p.step()
                time.sleep(0.003)  # two cores are for all of us
        except Exception:
            self.faults.append(traceback.format_exc())
        finally:
            p.close()

    def _maintain(self) -> None:
        try:
            with connect(self.dsn, "upkeep") as c:
                while not self.over.is_set():
                    for object_, step, done, problem in c.execute(
                        "select * from postbus.maintain()"
                    ).fetchall():
                        assert problem is None, f"{object_} {step}: {problem}"
                        self.done[step] += done
                    time.sleep(0.05)
        except Exception:
            self.faults.append(traceback.format_exc())


@contextmanager
def driver(dsn: str, out: Path, sink: str, most: int) -> Iterator[subprocess.Popen[str]]:
    """The driver with its JVM and workers, in a process group of their own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.driver", dsn, str(out), sink, str(most)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def batches(out: Path) -> int:
    """How many batches the query has begun."""
    return len(list((out / "checkpoint" / "offsets").glob("[0-9]*")))


def wait_for_batch(process: subprocess.Popen[str], out: Path, n: int, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while batches(out) < n:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < end, f"{batches(out)} batches of {n}"
        time.sleep(0.005)


def lake(spark: SparkSession, out: Path, sink: str, c: Connection) -> Counter[str]:
    if sink == "stream":
        payloads = window(c, position(c, "earliest", of="copy"), position(c, of="copy"), 4, "copy")
    elif sink == "delta":
        import deltalake

        payloads = deltalake.DeltaTable(str(out / "data")).to_pyarrow_table()["payload"].to_pylist()
    else:
        payloads = [r.payload for r in spark.read.parquet(str(out / "data")).collect()]
    return Counter(json.loads(p)["u"] for p in payloads)


def pending(c: Connection) -> int:
    c.execute("select postbus.tick(%s)", [STREAM])
    left = value(c, "select pending from postbus.list_groups() where stream = 's'")
    return int(left) + int(value(c, "select count(*) from postbus.scheduled"))


@pytest.mark.parametrize("sink", ["parquet", "delta", "stream"] if LONG else ["parquet", "stream"])
def test_kill_the_driver(spark: SparkSession, db: Database, tmp_path: Path, sink: str) -> None:
    seed, kills = 5, 4 if LONG else 1  # each takes a start of Spark
    rnd = random.Random(f"{seed}/{sink}")
    plant = Plant(db.dsn, seed)
    with plant.running():
        for _ in range(kills):
            with driver(db.dsn, tmp_path, sink, rnd.choice([40, 400])) as process:
                wait_for_batch(process, tmp_path, batches(tmp_path) + rnd.randint(2, 5))
                time.sleep(rnd.random() * 0.4)
                os.killpg(process.pid, signal.SIGKILL)
    c = db.connect()
    with driver(db.dsn, tmp_path, sink, 2000) as process:
        end = time.monotonic() + 120
        while pending(c):
            assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.monotonic() < end, f"{pending(c)} events left"
            time.sleep(0.1)
    plant.close()
    truth = {row[0] for row in c.execute("select uid from published").fetchall()}
    got = lake(spark, tmp_path, sink, c)
    assert truth - set(got) == set(), "lost"
    assert set(got) - truth == set(), "never committed"
    assert [u for u, n in got.items() if n > 1] == [], "twice"
    assert len(truth) > 500
    assert plant.done["rotate"] > 0
    assert plant.done["clean"] > 0
