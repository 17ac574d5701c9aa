"""Who is measured, with which settings, and one turn of each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench._database import Database
from bench._peers import create_stream

BATCH = 1000
_LIMIT = 120.0


@dataclass(frozen=True, eq=False)
class Contender:
    """A client library.

    Attributes:
        name: what tables call it.
        module: its module in ``bench._clients``.
        variants: settings to choose from; the best is taken.
        clean: statements that leave it with empty tables.
        left: counts the messages that are not finished.
        stream: to be made anew for every turn, with a group.
        times: it gets so many times the messages, or its turns would be over in a moment.
    """

    name: str
    module: str
    variants: tuple[dict[str, Any], ...]
    clean: tuple[str, ...] = ()
    left: str = ""
    stream: str = ""
    times: int = 1

    def begin(self, db: Database) -> None:
        """Begin a turn with empty tables."""
        with db.connect() as conn:
            for statement in self.clean:
                conn.execute(statement.encode())
            if self.stream:
                create_stream(conn, self.stream)
                conn.execute("select postbus.create_group(%s, 'bench')", [self.stream])

    def do(self, verb: str, db: Database, settings: dict[str, Any], **job: Any) -> Any:
        """Run one verb in a process of its own and return its answer."""
        with _process(self.module, verb, {"dsn": db.dsn, "settings": settings, **job}) as process:
            said, complaint = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{self.name}, {verb}: {complaint or said}")
        return json.loads(said.splitlines()[-1])

    def work(self, db: Database, settings: dict[str, Any], messages: int, seconds: float) -> float:
        """Messages a second of one worker with so many before it; all it handled has to be finished too."""
        messages *= self.times
        self.begin(db)
        self.do("fill", db, settings, messages=messages, batch=BATCH)
        with db.connect() as conn:
            conn.execute("vacuum analyze")
        result = self.do("work", db, settings, messages=messages, seconds=seconds)
        with db.connect() as conn:
            (left,) = conn.execute(self.left.encode()).fetchone() or (None,)
        if left != messages - result["handled"]:
            raise RuntimeError(f"{self.name}: {result['handled']} of {messages} handled, but {left} are left")
        return float(result["rate"])

    def produce(self, db: Database, settings: dict[str, Any], seconds: float) -> float:
        """Messages a second of one producer."""
        self.begin(db)
        return float(self.do("produce", db, settings, batch=BATCH, seconds=seconds))

    def latencies(self, db: Database, settings: dict[str, Any], pace: int, seconds: float) -> list[float]:
        """Seconds from sending to handling, of messages at a pace, between two processes."""
        self.begin(db)
        count = max(1, int(pace * seconds))
        job = {"dsn": db.dsn, "settings": settings, "messages": count, "pace": pace}
        with (
            _process(self.module, "watch", job) as watcher,
            _process(self.module, "pace", job) as producer,
        ):
            assert watcher.stdout is not None
            if watcher.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{self.name}: {watcher.communicate()[1]}")
            _, complaint = producer.communicate("go\n")
            if producer.returncode:
                raise RuntimeError(f"{self.name}, pace: {complaint}")
            said, complaint = watcher.communicate()
        if watcher.returncode:
            raise RuntimeError(f"{self.name}, watch: {complaint}")
        seen: list[float] = json.loads(said.splitlines()[-1])
        return seen


@contextmanager
def _process(module: str, verb: str, job: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A child that does not outlive the block, nor the limit."""
    command = [sys.executable, "-m", "bench._clients", module, verb, json.dumps(job)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        limit = threading.Timer(_LIMIT, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


# pgqueuer's own command runs it on uvloop. Its batch is the number of jobs it takes, and finishes, at a time.
PGQUEUER = Contender(
    "pgqueuer",
    "pgqueuer",
    (
        {"driver": "asyncpg", "batch": 100, "loop": "uvloop"},
        {"driver": "asyncpg", "batch": 500, "loop": "uvloop"},
        {"driver": "asyncpg pool", "batch": 500, "loop": "uvloop"},
        {"driver": "asyncpg pool", "batch": 1000, "loop": "uvloop"},
        {"driver": "psycopg", "batch": 500, "loop": "uvloop"},
    ),
    clean=("truncate pgqueuer, pgqueuer_log, pgqueuer_statistics",),
    left="select count(*) from pgqueuer",
)
PROCRASTINATE = Contender(
    "procrastinate",
    "procrastinate",
    (
        {"concurrency": 10, "delete": "always", "loop": "asyncio"},
        {"concurrency": 30, "delete": "always", "loop": "uvloop"},
        {"concurrency": 100, "delete": "always", "loop": "uvloop"},
    ),
    clean=("truncate procrastinate_jobs, procrastinate_events cascade",),
    left="select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
)
QUEUE = Contender(
    "queue",
    "postbus",
    (
        {"kind": "queue", "concurrency": 10, "prefetch": 200, "loop": "asyncio"},
        {"kind": "queue", "concurrency": 10, "prefetch": 1000, "loop": "asyncio"},
        {"kind": "queue", "concurrency": 10, "prefetch": 1000, "loop": "uvloop"},
    ),
    clean=(
        "select postbus.drop_queue(name, true) from postbus.queue where name = 'bench'",
        "select postbus.create_queue('bench')",
        "select * from postbus.maintain()",
    ),
    left="select count(*) from postbus.queued",
    times=2,
)
STREAM = Contender(
    "stream",
    "postbus",
    (
        {"kind": "stream", "concurrency": 10, "prefetch": 200, "loop": "asyncio"},
        {"kind": "stream", "concurrency": 10, "prefetch": 1000, "loop": "asyncio"},
        {"kind": "stream", "concurrency": 10, "prefetch": 1000, "loop": "uvloop"},
    ),
    clean=("select postbus.drop_stream(name, true) from postbus.stream where name = 'events'",),
    left="select pending + in_flight + waiting from postbus.list_groups() where stream = 'events'",
    stream="events",
    times=5,
)
RAW_QUEUE = Contender("send_batch in SQL", "raw", ({"kind": "queue"},), QUEUE.clean)
RAW_STREAM = Contender("publish_batch in SQL", "raw", ({"kind": "stream"},), STREAM.clean, stream="events")

PEERS = (PGQUEUER, PROCRASTINATE)
OURS = (QUEUE, STREAM)
