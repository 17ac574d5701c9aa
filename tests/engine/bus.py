"""Sessions with one clock: what the tests of the engine say, in few words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from tests.conftest import Database

T = TypeVar("T")

START = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Message:
    """What consume returns."""

    id: int
    type: str
    key: str | None
    payload: str | None
    blob: bytes | None
    headers: Any
    created_at: datetime
    attempt: int
    receipt: str
    batch: str


def payloads(messages: list[Message]) -> list[str | None]:
    return [m.payload for m in messages]


@contextmanager
def refused(sqlstate: str, saying: str = "") -> Iterator[None]:
    """The engine says no, and says how to put it right: in the message or in the hint."""
    with pytest.raises(psycopg.Error) as e:
        yield
    assert e.value.sqlstate == sqlstate, e.value
    told = f"{e.value.diag.message_primary} {e.value.diag.message_hint or ''}"
    assert saying in told, told


class Session:
    """A connection on the clock of its `Bus`. Statements commit by themselves unless `begin` was called."""

    def __init__(self, bus: Bus, conn: psycopg.Connection[Any]) -> None:
        self.bus = bus
        self.conn = conn
        self.sync()

    def sync(self) -> None:
        """Take over the clock of the bus; a rollback sets it back."""
        self.value("select set_config('postbus.fake_now', %s, false)", self.bus.now_text)

    def rows(self, query: str, *args: Any) -> list[Any]:
        cur = self.conn.execute(query.encode(), args or None)
        return cur.fetchall() if cur.description else []

    def value(self, query: str, *args: Any) -> Any:
        (row,) = self.rows(query, *args)
        return row[0]

    def begin(self, level: str = "read committed") -> Session:
        self.rows(f"begin isolation level {level}")
        if level != "read committed":
            self.rows("select count(*) from postbus.stream")  # takes the snapshot
        return self

    def commit(self) -> None:
        self.rows("commit")
        self.sync()

    def rollback(self) -> None:
        self.rows("rollback")
        self.sync()

    def stream(self, stream: str = "s", **options: Any) -> None:
        self.rows("select postbus.create_stream(%s, %s)", stream, Jsonb(options))

    def alter(self, stream: str = "s", **options: Any) -> None:
        self.rows("select postbus.alter_stream(%s, %s)", stream, Jsonb(options))

    def group(self, group: str = "g", of: str = "s", **options: Any) -> None:
        """A group; it starts at earliest unless told otherwise."""
        options = {"start": "earliest", **options}
        self.rows("select postbus.create_group(%s, %s, %s)", of, group, Jsonb(options))

    def publish(self, payload: str, key: str | None = None, to: str = "s", **named: Any) -> int:
        arguments = "".join(f", {name} => %s" for name in named)
        query = f"select postbus.publish(%s, %s::text, key => %s{arguments})"
        return int(self.value(query, to, payload, key, *named.values()))

    def fill(self, count: int, to: str = "s", keys: int = 0) -> None:
        """Publish so many events in one transaction, with keys k0, k1, ... in turn or without."""
        self.rows(
            "select postbus.publish_batch(%s, "
            " array(select 'e' || i from generate_series(1, %s) i order by i),"
            " keys => case when %s > 0 then"
            " array(select 'k' || i %% %s from generate_series(1, %s) i order by i) end)",
            *(to, count, keys, keys, count),
        )

    def consume(self, max: int = 100, by: str = "g", of: str = "s", **named: Any) -> list[Message]:
        arguments = "".join(f", {name} => %s" for name in named)
        with self.conn.cursor(row_factory=class_row(Message)) as cur:
            query = f"select * from postbus.consume(%s, %s, %s{arguments})"
            return cur.execute(query.encode(), [of, by, max, *named.values()]).fetchall()

    def ack(self, *receipts: str) -> int:
        if len(receipts) == 1:
            return int(self.value("select postbus.ack(%s::text)", receipts[0]))
        return int(self.value("select postbus.ack(%s::text[])", list(receipts)))

    def nack(self, *receipts: str, delay: float | None = None, reason: str | None = None) -> int:
        query = "select postbus.nack(%s::text[], make_interval(secs => %s), %s)"
        return int(self.value(query, list(receipts), delay, reason))

    def take(self, max: int = 100, by: str = "g", of: str = "s") -> list[str | None]:
        """Consume and ack until several calls in a row return nothing; the payloads in order."""
        got: list[str | None] = []
        empty = 0
        while empty < 3:
            page = self.consume(max, by, of)
            empty = 0 if page else empty + 1
            if page:
                assert self.ack(page[0].batch) == len(page)
                got += payloads(page)
        return got

    def maintain(self, times: int = 1) -> dict[str, int]:
        """What upkeep did, by step; a problem fails the test."""
        done: dict[str, int] = {}
        for _ in range(times):
            for name, step, n, problem in self.rows("select * from postbus.maintain()"):
                assert problem is None, f"{name} {step}: {problem}"
                done[step] = done.get(step, 0) + n
        return done

    def figures(self, group: str = "g", of: str = "s") -> dict[str, Any]:
        """The row of list_groups."""
        return dict(
            self.value(
                'select to_jsonb(l) from postbus.list_groups() l where stream = %s and "group" = %s',
                of,
                group,
            )
        )


@dataclass
class Bus:
    """A database with the engine, and a clock that stands still until it is moved."""

    db: Database
    now: datetime = START
    _sessions: list[Session] = field(default_factory=list)

    @property
    def now_text(self) -> str:
        return self.now.isoformat()

    def session(self, **options: Any) -> Session:
        s = Session(self, self.db.connect(options="-c lock_timeout=10s", **options))
        self._sessions.append(s)
        return s

    def wait(self, seconds: float) -> None:
        """Move the clock of every session. None of them may be in a transaction that has failed."""
        self.now += timedelta(seconds=seconds)
        for s in self._sessions:
            s.sync()

    @contextmanager
    def blocked(self, session: Session, call: Callable[[], T]) -> Iterator[Future[T]]:
        """Start a call that has to wait for a lock. Inside, it waits; afterwards its result is there."""
        watch = self.db.connect()
        pid = session.conn.info.backend_pid
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            end = time.monotonic() + 20
            waiting = "select count(*) from pg_locks where pid = %s and not granted"
            while watch.execute(waiting, [pid]).fetchone() != (1,):
                assert not future.done(), f"did not wait: {future.result()}"
                assert time.monotonic() < end, "neither waited nor ended"
            yield future
