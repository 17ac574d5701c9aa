"""Mirrors under fire: whatever sessions do at the same time, the lake table is the table.

``POSTBUS_FAULT_LONG=1`` (``make fault``) goes on for longer, with more seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.spark.lake import Bench
from tests.spark.mirrors import STREAM, Lake

LONG = bool(os.environ.get("POSTBUS_FAULT_LONG"))
ROUNDS = 12 if LONG else 2
TURNS = 60  # transactions for each run of a mirror
KEYS = 300

STATEMENTS = [
    "insert into t (id, p, n) select g, {p}, 0 from generate_series({a}, {b}) g on conflict do nothing",
    "insert into t (id, p, n) values ({a}, {p}, 1) on conflict (id, p) do update set n = t.n + 1",
    "update t set n = n + 1, a = 'row ' || n where id between {a} and {b}",
    "update t set id = id + 1000 where id between {a} and {b} and id < 1000 and p = {p}",
    "update t set id = {b} where id = {a}",
    "update t set p = 3 - p where id = {a}",
    # Two rows change places.
    "update t set id = -1 where id = {a} and p = {p}; update t set id = {a} where id = {b} and p = {p};"
    " update t set id = {b} where id = -1 and p = {p}",
    "delete from t where id between {a} and {b}",
    "savepoint s; update t set n = -1 where id < 50; rollback to s; update t set n = 7 where id = {a}",
    "insert into other values ({a}, 'x') on conflict (id) do update set a = other.a || 'x'",
    "truncate other",
]
RARE = [
    "truncate t",
    "truncate t; insert into t (id, p, n) select g, {p}, 9 from generate_series({a}, {b}) g",
]
MEANWHILE = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.SerializationFailure,
)


class Writers:
    """Sessions that change the tables at random until they are told to stop."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.stop = threading.Event()
        self.turns = threading.Semaphore(0)  # transactions that may still be made
        self.problems: list[BaseException] = []
        self.done = 0
        self.added = 0
        self.threads = [
            threading.Thread(target=self._guard, args=(body, f"{seed}/{i}"))
            for i, body in enumerate([self._write, self._write, self._write, self._alter])
        ]

    def _guard(self, body: Any, seed: str) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                conn.execute("set lock_timeout = '500ms'")
                body(conn, random.Random(seed))
        except BaseException as problem:
            self.problems.append(problem)

    def _write(self, conn: psycopg.Connection[Any], chance: random.Random) -> None:
        while not self.stop.is_set():
            if not self.turns.acquire(timeout=0.1):
                continue
            with contextlib.suppress(*MEANWHILE), conn.transaction() as block:
                for _ in range(chance.randint(1, 4)):
                    a = chance.randint(1, KEYS)
                    b = a + chance.choice([0, 1, 2, 15])
                    chosen = chance.choice(RARE if chance.random() < 0.01 else STATEMENTS)
                    conn.execute(chosen.format(a=a, b=b, p=chance.randint(1, 2)).encode())
                if chance.random() < 0.15:
                    raise psycopg.Rollback(block)
                self.done += 1
            self.stop.wait(chance.random() / 10)

    def _alter(self, conn: psycopg.Connection[Any], chance: random.Random) -> None:
        while not self.stop.is_set() and self.added < 4:
            kind = chance.choice(["int", "int default 5", "text default 'made ' || pg_backend_pid()"])
            with contextlib.suppress(*MEANWHILE):
                conn.execute(f"alter table t add c{self.added} {kind}".encode())
                self.added += 1
            self.stop.wait(1 + chance.random())

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in self.threads:
                thread.join()
        assert self.problems == []


@pytest.mark.timeout(1800 if LONG else 400)
@pytest.mark.parametrize("seed", range(1, 4) if LONG else [1])
def test_whatever_happens_meanwhile(bench: Bench, tmp_path: Path, seed: int) -> None:
    """Two mirrors of one table at once, while sessions write and somebody else begins backfills again."""
    lake = Lake(bench, tmp_path / "lake", lanes=3)
    lake.sql(
        "create table t (id int, p int, n int, a text, primary key (id, p))",
        "create table other (id int primary key, a text)",
        "insert into t select g, g % 2 + 1, 0 from generate_series(1, 250) g",
    )
    lake.capture("t", "other")
    chance = random.Random(seed)
    writers = Writers(lake.dsn, seed)
    formats = ["delta", "iceberg"]
    with writers.working():
        for round_ in range(ROUNDS):
            for kind in formats:
                writers.turns.release(TURNS)
                options: dict[str, Any] = {"name": f"t_{kind}", "format": kind, "history": kind == "delta"}
                run = lake.mirror(max_events=chance.choice([200, 500, 10000]), **options)
                assert run.until is not None
                # At the mirrored position, which is behind what the sessions have done since.
                assert lake.rows(f"t_{kind}", kind) == lake.replayed(run.until[STREAM]), (round_, kind)
                if chance.random() < 0.3:
                    lake.again(f"t_{kind}")
            if round_ == 0:
                lake.sql("select postbus.backfill('t', restart => true, batch => 100)")
    assert writers.done > 20
    assert writers.added > 0
    for kind in formats:
        lake.mirror(name=f"t_{kind}", format=kind)
        lake.check("t", f"t_{kind}", kind)
    check_history(lake)


def check_history(lake: Lake) -> None:
    """The open versions are the table, and no version of a key overlaps another."""
    rows = lake.table("t_delta_history").read().to_pylist()
    technical = {"_id", "_type", "_end_id", "_end_type", "valid_from", "valid_to", "_rescued"}
    now = [
        {k: v for k, v in r.items() if k not in technical and v is not None}
        for r in rows
        if not r["valid_to"]
    ]
    assert sorted(now, key=by_key) == sorted(lake.truth(), key=by_key)
    rows.sort(key=lambda r: (r["id"], r["p"], r["_id"]))
    for one, other in itertools.pairwise(rows):
        if (one["id"], one["p"]) == (other["id"], other["p"]):
            assert one["_end_id"] is not None
            assert one["_id"] < one["_end_id"] <= other["_id"]
            assert one["valid_from"] <= one["valid_to"] <= other["valid_from"]


def by_key(row: dict[str, Any]) -> tuple[int, int]:
    return row["id"], row["p"]
