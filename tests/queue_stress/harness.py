"""One stress run: producers, workers, a meddler and upkeep at once, then a drain, then the oracle."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from psycopg.types.json import Jsonb

from tests.queue_stress import ledger
from tests.queue_stress.meddler import Meddler
from tests.queue_stress.oracle import Book, check, read
from tests.queue_stress.producers import FIXED, QUEUES, TOPIC, Producer, Sent
from tests.queue_stress.workers import Worker
from tests.stress.actors import Actor, Connection, connect
from tests.stress.oracle import Violation, report

MANY = 100000
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_attempts": MANY},
    "mixed": {"max_attempts": 3, "on_ack": "archive", "keep_expired": True, "ageing": "50 ms"},
    "keyed": {"max_attempts": 6},
    "late": {"max_attempts": MANY},
    "fast": {"max_attempts": 3, "unlogged_unsafe": True},
}


@dataclass
class Plan:
    """What a run is made of; the seed chooses where nothing is said."""

    seed: int
    seconds: float = 2.0
    producers: int = 3
    queues: list[str] = field(default_factory=lambda: list(QUEUES))
    workers: dict[str, int] = field(
        default_factory=lambda: {"plain": 2, "mixed": 2, "keyed": 3, "late": 1, "fast": 1}
    )
    kills: bool = True
    meddle: bool = True
    old_snapshot: bool = False  # held open all the time, so that marks come into use
    leases: tuple[float, ...] = (0.08, 0.3, 1.0)
    drain: float = 30.0
    stall: float = 5.0  # nothing finished for that long: what is left will not come
    patch: Callable[[Connection], None] | None = None  # after setup, before the first message


@dataclass
class Result:
    plan: Plan
    violations: list[Violation]
    stats: Counter[str]

    def __str__(self) -> str:
        return report(self.plan.seed, self.violations, self.stats)


class Stress:
    """Runs a plan on a database that has the engine."""

    def __init__(self, dsn: str, plan: Plan) -> None:
        self.dsn = dsn
        self.plan = plan
        self.sent = Sent()
        self.faults: list[str] = []
        self.stats: Counter[str] = Counter()
        self.calm = threading.Event()
        self.over = threading.Event()
        self.actors: list[Actor] = []
        self.beside: Callable[[], None] | None = None  # another job to run while messages are produced

    def run(self) -> Result:
        with connect(self.dsn, "main") as main, connect(self.dsn, "snapshot") as snapshot:
            self._setup(main)
            if self.plan.patch is not None:
                self.plan.patch(main)
            self._cast()
            if self.plan.old_snapshot:
                snapshot.execute("begin isolation level repeatable read")
                snapshot.execute("select count(*) from sent")
            try:
                threads = self._start()
                self._wait_for_end()
                snapshot.execute("rollback")
                rates_until = self._lift(main)
                self._drain(main)
            finally:
                self.over.set()
            for t in threads:
                t.join(30)
                if t.is_alive():
                    self.faults.append(f"{t.name} does not end")
            self.faults += [r[0] for r in main.execute("select text from fault").fetchall()]
            violations = [Violation("fault", "-", f) for f in self.faults]
            violations += check(self._book(main, rates_until))
        for actor in self.actors:
            for what, n in actor.count.items():
                self.stats[f"{type(actor).__name__.lower()} {what}"] += n
        return Result(self.plan, violations, self.stats)

    # The stage.

    def _setup(self, c: Connection) -> None:
        c.execute(ledger.SETUP)
        for queue in self.plan.queues:
            options = {"lease": "500 ms", "backoff": "10 ms", "max_backoff": "50 ms", **OPTIONS[queue]}
            c.execute("select postbus.create_queue(%s, %s)", [queue, Jsonb(options)])
        if "keyed" in self.plan.queues:
            c.execute("select postbus.set_key_policy('keyed', concurrency => 2)")
            for key, (concurrency, rate, burst) in FIXED.items():
                c.execute(
                    "select postbus.set_key_policy('keyed', %s, concurrency => %s, rate => %s, burst => %s)",
                    [key, concurrency, rate, burst],
                )
        for queue in {"plain", "mixed"} & set(self.plan.queues):
            c.execute("select postbus.bind(%s, %s)", [queue, TOPIC])

    def _cast(self) -> None:
        p = self.plan
        self.actors = [
            Producer(self.dsn, f"p{i}", p.seed, queues=p.queues, sent=self.sent) for i in range(p.producers)
        ]
        if p.meddle:
            self.actors.append(Meddler(self.dsn, "meddler", p.seed, sent=self.sent, queues=p.queues))
        for queue in p.queues:
            for w in range(p.workers[queue]):
                worker = Worker(self.dsn, f"{queue}-{w}", p.seed, queue=queue, leases=p.leases)
                self.actors.append(worker)

    def _start(self) -> list[threading.Thread]:
        jobs: list[tuple[str, Callable[[], None]]] = [("upkeep", self._upkeep)]
        for actor in self.actors:
            if isinstance(actor, Worker):
                jobs.append((actor.name, lambda a=actor: self._work(a)))  # type: ignore[misc]
            elif isinstance(actor, Producer | Meddler):
                jobs.append((actor.name, lambda a=actor: self._act(a)))  # type: ignore[misc]
        if self.beside is not None:
            jobs.append(("beside", self.beside))
        if self.plan.kills:
            jobs.append(("killer", self._kill))
        threads = [threading.Thread(target=self._safely, args=job, name=job[0], daemon=True) for job in jobs]
        self.end = time.monotonic() + self.plan.seconds
        for t in threads:
            t.start()
        return threads

    def _safely(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            self.faults.append(f"{name}: {traceback.format_exc()}")

    def _act(self, a: Producer | Meddler) -> None:
        try:
            while time.monotonic() < self.end:
                a.step()
                a.pause(0.02 if isinstance(a, Meddler) else 0.004)
        finally:
            a.close()

    def _work(self, a: Worker) -> None:
        try:
            while not self.over.is_set():
                if not a.step(self.calm.is_set()):
                    time.sleep(0.004)
        finally:
            a.close()

    def _upkeep(self) -> None:
        rnd = random.Random(f"{self.plan.seed}/upkeep")
        with connect(self.dsn, "upkeep") as c:
            while not self.over.is_set():
                for object_, step, done, problem in c.execute("select * from postbus.maintain()").fetchall():
                    if problem is not None:
                        self.faults.append(f"maintain: {object_} {step}: {problem}")
                    self.stats[f"maintain {step}"] += done
                time.sleep(rnd.random() * 0.05)

    def _kill(self) -> None:
        rnd = random.Random(f"{self.plan.seed}/killer")
        with connect(self.dsn, "killer") as c:
            while time.monotonic() < self.end - 0.1:
                role = rnd.choice([a.name for a in self.actors])
                row = c.execute(
                    "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                    " where datname = current_database() and application_name = %s",
                    [f"stress {role}"],
                ).fetchone()
                self.stats["kills"] += row[0] if row else 0
                time.sleep(rnd.random() * 0.3)

    # The end.

    def _wait_for_end(self) -> None:
        while time.monotonic() < self.end:  # which may be put off meanwhile
            time.sleep(0.01)
        names = [a.name for a in self.actors if not isinstance(a, Worker)] + ["beside"]
        for t in threading.enumerate():
            if t.name in names:
                t.join(30)
        self.calm.set()

    def _lift(self, c: Connection) -> Any:
        """No more pauses, and no more rates, for the drain to be short. Returns when.

        A claim that is running has the time at which it began, and may still meet the new policy: the rates
        end with the beginning of the first of those.
        """
        row = c.execute(
            """select least(clock_timestamp(), min(query_start)) from pg_stat_activity
            where datname = current_database() and state = 'active'"""
        ).fetchone()
        for queue in self.plan.queues:
            c.execute("select postbus.resume(%s)", [queue])
        if "keyed" in self.plan.queues:
            for key in ["slow", "a", "b", "c", "d", "e"]:
                c.execute("select postbus.set_key_policy('keyed', %s, concurrency => 4)", [key])
            c.execute("select postbus.set_key_policy('keyed', 'slow line', concurrency => 1)")
        assert row is not None
        return row[0]

    def _drain(self, c: Connection) -> None:
        """Until nothing waits; dead letters are sent back once."""
        for queue in self.plan.queues:
            c.execute(ledger.REDRIVE, {"queue": queue})
        deadline = time.monotonic() + self.plan.drain
        left, progress = -1, time.monotonic()
        while left != 0:
            row = c.execute("select count(*), array_agg(id) from message").fetchone()
            assert row is not None
            now = time.monotonic()
            if row[0] != left:
                left, progress = row[0], now
            if now > deadline or now > progress + self.plan.stall:
                self.faults.append(
                    f"drain: {left} left, none finished for {now - progress:.1f} s: {row[1][:20]}"
                )
                return
            time.sleep(0.01)

    def _book(self, c: Connection, rates_until: Any) -> Book:
        row = c.execute("select clock_timestamp()").fetchone()
        assert row is not None
        book = Book(row[0], {q: OPTIONS[q]["max_attempts"] for q in self.plan.queues})
        book.limits = {k: p[0] for k, p in FIXED.items() if p[0] is not None}
        book.rates = {k: (p[1], p[2]) for k, p in FIXED.items() if p[1] is not None and p[2] is not None}
        book.rates_until = rates_until
        book.committed = self.sent.committed
        for a in self.actors:
            if isinstance(a, Worker):
                book.seen |= a.seen
        read(c, book, [q for q in ["mixed"] if q in self.plan.queues])
        self.stats["sent"] = len(book.sent)
        self.stats["delivered"] = len(book.delivered)
        return book
