"""One stress run: producers, workers and upkeep at once, then a drain, then the oracle."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.stress.actors import (
    PUBLISH,
    SETUP,
    SHARED_KEYS,
    STREAM,
    Actor,
    Connection,
    Producer,
    Worker,
    connect,
)
from tests.stress.oracle import Acked, Book, Memory, Published, Violation, check, report

BAD_ARGUMENT = "PB003"


@dataclass
class Plan:
    """What a run is made of; the seed chooses where nothing is said."""

    seed: int
    seconds: float = 2.5
    producers: int = 3
    two_phase: int = 1
    workers: int = 2
    lanes: tuple[int, ...] = (3, 8, 2)
    segments: int = 3
    kills: bool = True
    upkeep: bool = True
    transactional: float = 0.3  # how often workers consume, publish and ack in one transaction
    straggler: bool = False  # a transaction stays open from the first event until all others are acked
    drain: float = 30.0
    stall: float = 4.0  # no ack for that long while events are missing: they will not come
    groups: dict[str, str] = field(
        default_factory=lambda: {"total": "stream", "keyed": "key", "free": "none", "fragile": "key"}
    )
    patch: Callable[[Connection], None] | None = None  # after setup, before the first event


@dataclass
class Result:
    plan: Plan
    violations: list[Violation]
    stats: dict[str, Any]

    def __str__(self) -> str:
        return report(self.plan.seed, self.violations, self.stats)


class Stress:
    """Runs a plan on a database that has the engine."""

    def __init__(self, dsn: str, plan: Plan) -> None:
        self.dsn = dsn
        self.plan = plan
        self.log = Memory()
        self.faults: list[str] = []
        self.stats: dict[str, int] = {}
        self.producing = threading.Event()
        self.calm = threading.Event()
        self.over = threading.Event()
        self.actors: list[Actor] = []
        self.beside: Callable[[], None] | None = None  # another job to run while events are produced

    def run(self) -> Result:
        with connect(self.dsn, "main") as main:
            self._setup(main)
            if self.plan.patch is not None:
                self.plan.patch(main)
            self._cast()
            straggler = self._open_straggler() if self.plan.straggler else None
            try:
                threads = self._start()
                self._wait_for_end()
                self._drain(main)
                if straggler is not None:
                    straggler.execute("commit")
                    self._drain(main)
            finally:
                if straggler is not None:
                    straggler.close()
                self.over.set()
                self.calm.set()
            for t in threads:
                t.join(30)
                if t.is_alive():
                    self.faults.append(f"{t.name} does not end")
            self._settle_prepared(main)
            violations = [Violation("fault", "-", f) for f in self.faults]
            violations += check(self._book(main))
            if not violations:
                violations += self._at_rest(main)
        for actor in self.actors:
            for what, n in actor.count.items():
                key = f"{type(actor).__name__.lower()} {what}"
                self.stats[key] = self.stats.get(key, 0) + n
        return Result(self.plan, violations, self.stats)

    # The stage.

    def _setup(self, c: Connection) -> None:
        c.execute(SETUP)
        create_stream(c, lanes=self.plan.lanes[0], segments=self.plan.segments)
        for name, ordering in self.plan.groups.items():
            options = {
                "ordering": ordering,
                "start": "earliest",
                "lease": "500 milliseconds",
                "backoff": "10 milliseconds",
                "max_backoff": "100 milliseconds",
                "max_attempts": 3 if name == "fragile" else 100000,
            }
            c.execute("select postbus.create_group(%s, %s, %s)", [STREAM, name, Jsonb(options)])
        names = [f"k{i}" for i in range(SHARED_KEYS)]
        names += ["straggler"]
        names += [f"p2-{i}-{j}" for i in range(self.plan.two_phase) for j in range(5)]
        names += [f"own-{g}-{w}" for g in self.plan.groups for w in range(10)]
        c.execute("insert into counter select unnest(%s::text[])", [names])

    def _cast(self) -> None:
        p = self.plan
        row = None
        with connect(self.dsn, "main") as c:
            row = c.execute("select current_setting('max_prepared_transactions')::int").fetchone()
        prepared = row is not None and row[0] >= p.two_phase
        self.actors = [Producer(self.dsn, f"p{i}", p.seed) for i in range(p.producers)]
        self.actors += [
            Producer(self.dsn, f"p2-{i}", p.seed, two_phase=True) for i in range(p.two_phase * prepared)
        ]
        for group, ordering in p.groups.items():
            for w in range(p.workers):
                worker = Worker(self.dsn, f"{group}-{w}", p.seed, group=group, ordering=ordering)
                worker.fragile = group == "fragile"
                worker.transactional = p.transactional
                worker.sink = self.log
                worker.fault = self.faults.append
                self.actors.append(worker)

    def _start(self) -> list[threading.Thread]:
        jobs: list[tuple[str, Callable[[], None]]] = []
        for actor in self.actors:
            if isinstance(actor, Producer):
                jobs.append((actor.name, lambda a=actor: self._produce(a)))  # type: ignore[misc]
            elif isinstance(actor, Worker):
                jobs.append((actor.name, lambda a=actor: self._work(a)))  # type: ignore[misc]
        if self.plan.upkeep:
            jobs.append(("upkeep", self._upkeep))
        if len(self.plan.lanes) > 1:
            jobs.append(("lanes", self._change_lanes))
        if self.beside is not None:
            jobs.append(("beside", self.beside))
        if self.plan.kills:
            jobs.append(("killer", self._kill))
        threads = [threading.Thread(target=self._safely, args=job, name=job[0], daemon=True) for job in jobs]
        self.begun = time.monotonic()
        self.end = self.begun + self.plan.seconds
        for t in threads:
            t.start()
        return threads

    def _safely(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            self.faults.append(f"{name}: {traceback.format_exc()}")

    def _produce(self, a: Producer) -> None:
        try:
            while time.monotonic() < self.end:
                a.step()
        finally:
            a.close()

    def _work(self, a: Worker) -> None:
        try:
            while not self.over.is_set():
                if not a.step(self.calm.is_set()):
                    time.sleep(0.002)
        finally:
            a.close()

    def _upkeep(self) -> None:
        rnd = random.Random(f"{self.plan.seed}/upkeep")
        with connect(self.dsn, "upkeep") as c:
            while not self.over.is_set():
                self._maintain(c)
                time.sleep(rnd.random() * 0.04)

    def _maintain(self, c: Connection) -> None:
        for object_, step, done, problem in c.execute("select * from postbus.maintain()").fetchall():
            if problem is not None:
                self.faults.append(f"maintain: {object_} {step}: {problem}")
            self.stats[f"maintain {step}"] = self.stats.get(f"maintain {step}", 0) + done

    def _change_lanes(self) -> None:
        rest = self.plan.lanes[1:]
        with connect(self.dsn, "lanes") as c:
            for i, lanes in enumerate(rest):
                at = self.begun + self.plan.seconds * (i + 1) / (len(rest) + 1)
                time.sleep(max(0.0, at - time.monotonic()))
                while True:
                    try:
                        c.execute(
                            "select postbus.alter_stream(%s, %s)",
                            [STREAM, Jsonb({"lanes": lanes, "segments": 3 + i})],
                        )
                    except psycopg.Error as e:
                        # "Still settling" and "being ticked": it says try again.
                        if e.sqlstate != BAD_ARGUMENT:
                            raise
                        if time.monotonic() > self.end:
                            return
                        time.sleep(0.005)
                    else:
                        self.stats["lane changes"] = self.stats.get("lane changes", 0) + 1
                        break

    def _kill(self) -> None:
        rnd = random.Random(f"{self.plan.seed}/killer")
        with connect(self.dsn, "killer") as c:
            while time.monotonic() < self.end:
                time.sleep(rnd.random() * 0.3)
                if time.monotonic() > self.end - 0.1:
                    return
                role = rnd.choice([a.name for a in self.actors])
                row = c.execute(
                    "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                    " where datname = current_database() and application_name = %s",
                    [f"stress {role}"],
                ).fetchone()
                self.stats["kills"] = self.stats.get("kills", 0) + (row[0] if row else 0)

    # The end.

    def _open_straggler(self) -> Connection:
        c = connect(self.dsn, "straggler")
        c.execute("begin")
        for pos in range(3):
            args = {
                "stream": STREAM,
                "uid": f"straggler/{pos}",
                "tx": "straggler",
                "pos": pos,
                "key": "straggler",
            }
            c.execute(PUBLISH, args)
        return c

    def _wait_for_end(self) -> None:
        while time.monotonic() < self.end:  # which may be put off meanwhile
            time.sleep(0.01)
        self.calm.set()
        names = [a.name for a in self.actors if isinstance(a, Producer)] + ["beside"]
        for t in threading.enumerate():
            if t.name in names:
                t.join(30)

    def _drain(self, c: Connection) -> None:
        """Until every group has acked every committed event; dead letters are sent back for that."""
        deadline = time.monotonic() + self.plan.drain
        acked, progress = -1, time.monotonic()
        while True:
            self._redrive(c)
            row = c.execute(
                "select (select count(*) from published) * %s, count(distinct (grp, uid)) from audit",
                [len(self.plan.groups)],
            ).fetchone()
            assert row is not None
            if row[0] == row[1]:
                break
            now = time.monotonic()
            if row[1] != acked:
                acked, progress = row[1], now
            if now > deadline or now > progress + self.plan.stall:
                self.faults.append(f"drain: {row[1]} of {row[0]} acked, none for {now - progress:.1f} s")
                break
            time.sleep(0.01)
        self.stats["published"] = row[0] // len(self.plan.groups)

    def _redrive(self, c: Connection) -> None:
        rows = c.execute(
            "select id, group_name, payload::jsonb ->> 'u' from postbus.dead_letters(%s, max => 1000)",
            [STREAM],
        )
        for id_, group, uid in rows.fetchall():
            with c.transaction():
                c.execute("insert into died values (%s, %s)", [group, uid])
                c.execute("select postbus.redrive(%s, array[%s::bigint], %s)", [STREAM, id_, group])
            self.stats["redriven"] = self.stats.get("redriven", 0) + 1

    def _settle_prepared(self, c: Connection) -> None:
        """A killed producer leaves its prepared transactions behind: they would outlive the database."""
        for (gid,) in c.execute(
            "select gid from pg_prepared_xacts where database = current_database()"
        ).fetchall():
            c.execute(sql.SQL("rollback prepared {}").format(sql.Literal(gid)))

    def _book(self, c: Connection) -> Book:
        return read_book(c, self.plan.groups, self.log)

    def _at_rest(self, c: Connection) -> list[Violation]:
        """Nothing is left: no message to get, none out, none waiting; and old segments can be emptied."""
        found = []
        for group in self.plan.groups:
            row = c.execute("select count(*) from postbus.consume(%s, %s)", [STREAM, group]).fetchone()
            if row is None or row[0] != 0:
                found.append(Violation("not empty after the drain", group, f"{row}"))
        for group, *left in c.execute(
            'select "group", in_flight, waiting, dead_letters from postbus.list_groups()'
        ).fetchall():
            if left != [0, 0, 0]:
                found.append(Violation("left over", group, f"in flight, waiting, dead: {left}"))
        if self.plan.upkeep:
            for _ in range(20):
                self._maintain(c)
            if self.stats.get("maintain clean", 0) == 0:
                found.append(Violation("nothing was cleaned", "-", f"{self.stats}"))
        return found


def create_stream(c: Connection, lanes: int, segments: int, name: str = STREAM) -> None:
    options = {
        "lanes": lanes,
        "segments": segments,
        "rotate_every": "200 milliseconds",
        "retain": "0 seconds",
    }
    c.execute("select postbus.create_stream(%s, %s)", [name, Jsonb(options)])


def read_book(c: Connection, groups: dict[str, str], log: Memory) -> Book:
    return Book(
        groups,
        [Published(*row) for row in c.execute("select uid, tx, pos, key, seq from published").fetchall()],
        [Acked(*row) for row in c.execute("select n, grp, uid, batch from audit").fetchall()],
        {(row[0], row[1]) for row in c.execute("select grp, uid from died").fetchall()},
        log,
    )
