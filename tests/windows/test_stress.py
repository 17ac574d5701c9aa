"""Every committed event is in exactly one of the windows that a reader goes through, whatever producers do.

Producers commit in random order, roll back, prepare and are cut; upkeep rotates, truncates and prunes; the
lane count changes; the reader takes random bounds and parts. A failure names its seed.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Database
from tests.stress import broken
from tests.stress.actors import SETUP, SHARED_KEYS, STREAM, Producer, connect
from tests.stress.harness import create_stream
from tests.stress.sessions import Connection, value
from tests.windows.reading import Reader


class Run:
    """Producers, upkeep and one reader for some seconds; then the reader drains."""

    def __init__(
        self, dsn: str, seed: int, seconds: float, patch: Callable[[Connection], None] | None = None
    ) -> None:
        self.dsn, self.seed, self.seconds = dsn, seed, seconds
        self.rnd = random.Random(f"{seed}/run")
        self.lanes = self.rnd.choice([(1,), (3, 8), (1, 3), (4, 1)])
        self.grouped = seed % 2 == 0
        self.faults: list[str] = []
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.patch = patch

    def run(self) -> tuple[Counter[str], set[str], Reader]:
        with connect(self.dsn, "main") as c, connect(self.dsn, "reader") as mine:
            c.execute(SETUP)
            create_stream(c, lanes=self.lanes[0], segments=self.rnd.choice([2, 3, 5]))
            if not self.grouped:  # nobody holds the log back but its retention
                c.execute("select postbus.alter_stream(%s, %s)", [STREAM, Jsonb({"retain": "1 hour"})])
            else:
                options = {"ordering": self.rnd.choice(["stream", "key", "none"]), "start": "earliest"}
                c.execute("select postbus.create_group(%s, 'spark', %s)", [STREAM, Jsonb(options)])
            names = [f"k{i}" for i in range(SHARED_KEYS)] + [f"p2-0-{j}" for j in range(5)]
            c.execute("insert into counter select unnest(%s::text[])", [names])
            if self.patch is not None:
                self.patch(c)
            # The cleaner locks a leaf before the stream row, but gives up after 50 ms.
            mine.execute("set deadlock_timeout = '1s'")
            reader = Reader(mine, self.seed, group="spark" if self.grouped else None)
            producers = [Producer(self.dsn, f"p{i}", self.seed) for i in range(3)]
            producers.append(Producer(self.dsn, "p2-0", self.seed, two_phase=True))
            end = time.monotonic() + self.seconds
            jobs = [lambda p=p: self._produce(p, end) for p in producers]
            writers = [threading.Thread(target=self._safely, args=[j], daemon=True) for j in jobs]
            beside = [
                threading.Thread(target=self._safely, args=[j], daemon=True)
                for j in (self._upkeep, self._change_lanes)
            ]
            for t in [*writers, *beside]:
                t.start()
            try:
                while any(t.is_alive() for t in writers):
                    reader.step()
                    time.sleep(self.rnd.random() * 0.003)
                self._drain(c, reader)
            finally:
                self.over.set()
                for t in beside:
                    t.join(30)
            truth = {row[0] for row in c.execute("select uid from published").fetchall()}
            assert not self.faults, self.faults[0]
        return Counter(reader.got), truth, reader

    def _drain(self, c: Connection, reader: Reader) -> None:
        quiet = 0
        end = time.monotonic() + 30
        while quiet < 5:
            assert time.monotonic() < end, "the reader does not come to an end"
            left = value(c, "select count(*) from postbus.scheduled")
            quiet = 0 if reader.step() or left else quiet + 1
            if left:
                time.sleep(0.02)

    def _safely(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            self.faults.append(traceback.format_exc())

    def _produce(self, p: Producer, end: float) -> None:
        try:
            while time.monotonic() < end:
                p.step()
        finally:
            p.close()

    def _upkeep(self) -> None:
        rnd = random.Random(f"{self.seed}/upkeep")
        with connect(self.dsn, "upkeep") as c:
            while not self.over.is_set():
                for object_, step, done, problem in c.execute("select * from postbus.maintain()").fetchall():
                    assert problem is None, f"{object_} {step}: {problem}"
                    self.done[step] += done
                time.sleep(rnd.random() * 0.02)

    def _change_lanes(self) -> None:
        if len(self.lanes) > 1:
            time.sleep(self.seconds / 2)
            with connect(self.dsn, "lanes") as c:
                c.execute(
                    "select postbus.alter_stream(%s, %s)",
                    [STREAM, Jsonb({"lanes": self.lanes[1], "segments": 6})],
                )


def compare(run: Run) -> tuple[set[str], set[str], list[str]]:
    """Lost, never committed, twice."""
    got, truth, _ = run.run()
    return truth - set(got), set(got) - truth, [u for u, n in got.items() if n > 1]


@pytest.mark.parametrize("seed", range(1, 13))
def test_every_event_is_in_one_window(db: Database, seed: int) -> None:
    run = Run(db.dsn, seed, 2.0)
    lost, extra, twice = compare(run)
    assert (lost, extra, twice) == (set(), set(), []), f"seed {seed}"
    assert run.done["rotate"] > 0
    assert not run.grouped or run.done["clean"] > 0


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_for_longer(db: Database, request: pytest.FixtureRequest) -> None:
    if "fault" not in request.config.option.markexpr:
        pytest.skip("runs in make fault")
    lost, extra, twice = compare(Run(db.dsn, 100, 60.0))
    assert (lost, extra, twice) == (set(), set(), [])


def without_late_arm(c: Connection) -> None:
    """Rule 1: transactions that were open at the base are forgotten."""
    broken.rewrite(
        c,
        "postbus._arms(int, postbus.tick, postbus.tick, bigint, bigint)",
        ("where pg_visible_in_snapshot(x, p_upper.snapshot)", "where false"),
    )


def fresh_from_hi(c: Connection) -> None:
    """Rule 2: fresh events are looked for above the largest id that the base may have seen."""
    broken.rewrite(
        c,
        "postbus._arms(int, postbus.tick, postbus.tick, bigint, bigint)",
        ("greatest(p_after, p_base.floor)", "greatest(p_after, p_base.hi)"),
    )


@pytest.mark.parametrize("patch", [without_late_arm, fresh_from_hi])
def test_a_broken_reader_is_noticed(db: Database, patch: Callable[[Connection], None]) -> None:
    for seed in range(1, 9):
        run = Run(db.dsn, seed, 1.5, patch)
        try:
            lost, _, _ = compare(run)
        except AssertionError:  # the reader's own checks noticed
            return
        if lost:
            return
        db.connect().execute("drop table counter, published, audit, died")
        db.connect().execute("select postbus.drop_stream('s', true)")
    pytest.fail("lost nothing")
