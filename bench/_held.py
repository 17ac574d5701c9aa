"""Work at a steady pace while another session holds a snapshot open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from bench import _cpu, _lookups
from bench._database import Connection, Database
from bench._lookups import Lookup
from bench._peers import PAYLOAD, Pgmq, Postbus, Reader, call, create_stream

RATE = 500
BATCH = 10
PAGE = 100
PARTS = 3
KINDS = {
    "read-only": ("begin isolation level repeatable read", "select 1"),
    "with an xid": ("begin", "select pg_current_xact_id()"),
}
_SEND = {
    "pgmq": b"select * from pgmq.send_batch($1, $2::jsonb[])",
    "postbus": b"select postbus.publish_batch($1, $2::text[])",
}
_WARM_UP = 1.0


@dataclass
class Part:
    """One part of a run: how long each call took, in ms."""

    read: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    maintain: list[float] = field(default_factory=list)
    empty: int = 0  # reads that found nothing and were repeated
    cpu: float | None = None  # of the consumer's backend, per batch


@dataclass
class Held:
    """What one system did while the snapshot was held."""

    seconds: float
    parts: list[Part]
    before: dict[str, Lookup] = field(default_factory=dict)
    after: dict[str, Lookup] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """A producer and a consumer in step: what the one publishes, the other takes and finishes."""

    system: str
    reader: Reader
    send: Callable[[], None]
    consumer: Connection
    look: Connection


def hold(db: Database, kind: str, system: str, name: str, seconds: float) -> Held:
    """Let a system work under a snapshot of the given kind."""
    with ExitStack() as stack:
        conns = [stack.enter_context(db.connect()) for _ in range(4)]
        consumer, producer, look, holder = conns
        work = _Work(system, _reader(consumer, system, name), _sender(producer, system, name), consumer, look)
        held = Held(seconds, [Part() for _ in range(PARTS)])
        _cycles(work, [Part()], min(_WARM_UP, seconds / 5))
        for statement in KINDS[kind]:
            holder.execute(statement.encode())
        held.before = _measure(work)
        with _maintained(db, held) if system == "postbus" else ExitStack():
            _cycles(work, held.parts, seconds)
        held.after = _measure(work)
        time.sleep(1.2)  # statistics come up to a second late
        held.dead = _lookups.dead_rows(look, system)
        return held


def _reader(conn: Connection, system: str, name: str) -> Reader:
    if system == "pgmq":
        conn.execute("select pgmq.create(%s)", [name])
        return Pgmq(conn, name)
    create_stream(conn, name)
    conn.execute("select postbus.create_group(%s, 'bench')", [name])
    return Postbus(conn, name, "bench")


def _sender(conn: Connection, system: str, name: str) -> Callable[[], None]:
    element = '"' + PAYLOAD.replace('"', '\\"') + '"'
    params = [name.encode(), b"{%s}" % b",".join([element.encode()] * BATCH)]
    conn.pgconn.prepare(b"send", _SEND[system])

    def send() -> None:
        call(conn.pgconn, b"send", params)

    return send


def _cycles(work: _Work, parts: list[Part], seconds: float) -> None:
    """Publish, take and finish a batch, `RATE` times a second or as fast as the system can."""
    start = due = time.perf_counter()
    for i, part in enumerate(parts, 1):
        cpu = _cpu.of_connection(work.consumer)
        while (now := time.perf_counter()) < start + seconds * i / len(parts):
            time.sleep(max(0.0, due - now))
            due = max(due + 1 / RATE, now)
            _cycle(work, part)
        after = _cpu.of_connection(work.consumer)
        if cpu is not None and after is not None and part.read:
            part.cpu = (after - cpu) * 1000 / len(part.read)


def _cycle(work: _Work, part: Part) -> None:
    work.send()
    t0 = time.perf_counter()
    page = work.reader.read(PAGE)
    while not page.payloads:  # somebody else, such as maintain(), was at it just then
        part.empty += 1
        page = work.reader.read(PAGE)
    t1 = time.perf_counter()
    work.reader.finish(page)
    t2 = time.perf_counter()
    if len(page.payloads) != BATCH:
        raise RuntimeError(f"{work.system} returned {len(page.payloads)} of {BATCH} events")
    part.read.append((t1 - t0) * 1000)
    part.finish.append((t2 - t1) * 1000)


def _measure(work: _Work) -> dict[str, Lookup]:
    """Look while a lease is open: that is when the lookups find their rows."""
    if work.system == "pgmq":
        return {}
    work.send()
    while not (page := work.reader.read(PAGE)).payloads:
        time.sleep(0.001)
    found = _lookups.measure(work.look, page.receipt.decode())
    work.reader.finish(page)
    return found


@contextmanager
def _maintained(db: Database, held: Held) -> Iterator[None]:
    """Call maintain() every second, as `postbus up` and workers do."""
    over = threading.Event()
    start = time.perf_counter()

    def maintain() -> None:
        with db.connect() as conn:
            while not over.wait(1):
                t0 = time.perf_counter()
                conn.execute("select * from postbus.maintain()")
                part = min(PARTS - 1, int((t0 - start) / held.seconds * PARTS))
                held.parts[part].maintain.append((time.perf_counter() - t0) * 1000)

    thread = threading.Thread(target=maintain)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
