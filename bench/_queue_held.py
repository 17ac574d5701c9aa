"""A queue at a steady pace while a snapshot is held open: one producer and some consumers, each a process."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench import _cpu, _lookups, _queue_work
from bench._database import Database
from bench._peers import PAYLOAD, call, prepare

RATE = 1500
BATCH = 10
CONSUMERS = 2
# A consumer that did not get a full batch waits this long.
PAUSE = 0.005
_WARM_UP = 1.0
_SEND = {
    "pgmq": b"select * from pgmq.send('bench', $1::jsonb)",
    "postbus": b"select postbus.send('bench', $1::text)",
}


@dataclass
class Part:
    """One part of a run. Times in ms, of reads that found something."""

    read: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    messages: int = 0
    empty: int = 0
    cpu: float | None = 0.0  # of the consumers' backends, in ms

    def add(self, other: Part) -> None:
        """Count in what another consumer did."""
        self.read += other.read
        self.finish += other.finish
        self.messages += other.messages
        self.empty += other.empty
        self.cpu = None if self.cpu is None or other.cpu is None else self.cpu + other.cpu


@dataclass
class Held:
    """What one system did."""

    seconds: float
    parts: list[Part]
    sent: int = 0
    left: int = 0
    maintain: list[float] = field(default_factory=list)
    dead: dict[str, int] = field(default_factory=dict)
    marks: str = ""


@dataclass(frozen=True)
class _Job:
    """What a process needs to know. The clock is the machine's monotonic one, which its processes share."""

    db: Database
    system: str
    start: float
    seconds: float
    parts: int

    @property
    def end(self) -> float:
        return self.start + self.seconds


def hold(db: Database, system: str, seconds: float, parts: int) -> Held:
    """Let a system work under a snapshot that is as old as the run."""
    with db.connect() as look, db.connect() as holder:
        _queue_work.create(look, system)
        spawn = multiprocessing.get_context("spawn")
        ready = time.monotonic() + 3  # processes take a second or two to start
        job = _Job(db, system, ready + _WARM_UP, seconds, parts)
        with spawn.Pool(CONSUMERS + 1) as pool:
            consumers = [pool.apply_async(_consume, (job,)) for _ in range(CONSUMERS)]
            producer = pool.apply_async(_produce, (job,))
            time.sleep(max(0.0, job.start - time.monotonic()))
            holder.execute("begin isolation level repeatable read")
            holder.execute("select 1")
            held = Held(seconds, [Part() for _ in range(parts)])
            with _maintained(db, held, system):
                held.sent = producer.get()
                for consumer in consumers:
                    for part, done in zip(held.parts, consumer.get(), strict=True):
                        part.add(done)
        held.left = _queue_work.size(look, system)
        held.marks = _marks(db) if system == "postbus" else ""
        time.sleep(1.2)  # statistics come up to a second late
        held.dead = _lookups.dead_rows(look, system)
        holder.execute("rollback")
        return held


def _produce(job: _Job) -> int:
    """Send one message per transaction, on schedule: a late one is made up for."""
    with job.db.connect() as conn:
        prepare(conn.pgconn, b"send", _SEND[job.system])
        payload = PAYLOAD.encode()
        first = max(job.start - _WARM_UP, time.monotonic())
        sent = due = 0
        while (now := time.monotonic()) < job.end:
            ahead = first + due / RATE - now
            if ahead > 0:
                time.sleep(min(ahead, job.end - now))
                continue
            call(conn.pgconn, b"send", [payload])
            due += 1
            sent += now >= job.start
        return sent


def _consume(job: _Job) -> list[Part]:
    """Take and finish until the end."""
    parts = [Part() for _ in range(job.parts)]
    with job.db.connect() as conn:
        reader = _queue_work.reader(conn, job.system)
        while (now := time.monotonic()) < job.end:
            cpu = _cpu.of_connection(conn)
            t0 = time.perf_counter()
            page = reader.read(BATCH)
            t1 = time.perf_counter()
            if page.payloads:
                reader.finish(page)
            t2 = time.perf_counter()
            if now >= job.start:
                part = parts[min(job.parts - 1, int((now - job.start) / job.seconds * job.parts))]
                after = _cpu.of_connection(conn)
                used = None if cpu is None or after is None else (after - cpu) * 1000
                part.cpu = None if part.cpu is None or used is None else part.cpu + used
                part.messages += len(page.payloads)
                part.empty += not page.payloads
                if page.payloads:
                    part.read.append((t1 - t0) * 1000)
                    part.finish.append((t2 - t1) * 1000)
            if len(page.payloads) < BATCH:
                time.sleep(PAUSE)
    return parts


def _marks(db: Database) -> str:
    """Whether the queue begins to read at marks, and how many there are."""
    with db.connect() as conn:
        row = conn.execute(
            """select pg_sequence_last_value(q.register) & 1024 <> 0,
              (select count(*) from postbus.mark m where m.queue_id = q.id)
            from postbus.queue q"""
        ).fetchone()
    assert row is not None
    return f"{'in use' if row[0] else 'not in use'}, {row[1]} rows"


@contextmanager
def _maintained(db: Database, held: Held, system: str) -> Iterator[None]:
    """Call maintain() every second, as `postbus up` and workers do."""
    over = threading.Event()

    def maintain() -> None:
        with db.connect() as conn:
            while not over.wait(1):
                t0 = time.perf_counter()
                conn.execute("select * from postbus.maintain()")
                held.maintain.append((time.perf_counter() - t0) * 1000)

    thread = threading.Thread(target=maintain)
    if system == "postbus":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if system == "postbus":
            thread.join()
