"""Sessions that send and receive: what the tests of the queue engine say, in few words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from tests.engine.bus import Bus, Session


@dataclass(frozen=True)
class Work:
    """What receive returns."""

    id: int
    type: str
    key: str | None
    payload: str | None
    blob: bytes | None
    headers: Any
    created_at: datetime
    attempt: int
    receipt: str
    priority: int
    state: Any


# Every way through the engine that a queue can take.
KINDS = ["plain", "priorities", "keyed", "unlogged", "archive"]
VERBS = ["ack", "nack", "release", "extend", "dead_letter"]


def told(work: list[Work]) -> list[str | None]:
    """The payloads, in order."""
    return [m.payload for m in work]


def named(arguments: dict[str, Any]) -> str:
    return "".join(f", {name} => %s" for name in arguments)


class Desk(Session):
    """A session that works on queues; the queue is `q` unless another is named."""

    bus: Office

    def begin(self, level: str = "read committed") -> Desk:
        super().begin(level)
        return self

    def queue(self, queue: str = "q", **options: Any) -> None:
        self.rows("select postbus.create_queue(%s, %s)", queue, Jsonb(options))

    def alter_queue(self, queue: str = "q", **options: Any) -> None:
        self.rows("select postbus.alter_queue(%s, %s)", queue, Jsonb(options))

    def queue_of_kind(self, kind: str, queue: str = "q") -> None:
        self.queue(
            queue, unlogged_unsafe=kind == "unlogged", on_ack="archive" if kind == "archive" else "delete"
        )
        if kind == "keyed":
            self.policy(of=queue, concurrency=2)
        if kind == "priorities":
            self.send("urgent", to=queue, priority=5)
            self.drain(of=queue)

    def policy(self, key: str | None = None, of: str = "q", **limits: Any) -> None:
        query = f"select postbus.set_key_policy(%s, %s{named(limits)})"
        self.rows(query, of, key, *limits.values())

    def send(self, payload: str, key: str | None = None, to: str = "q", **options: Any) -> int:
        query = f"select postbus.send(%s, %s::text, key => %s{named(options)})"
        return int(self.value(query, to, payload, key, *options.values()))

    def send_all(self, *payloads: str, to: str = "q", **options: Any) -> list[int]:
        """One batch."""
        query = f"select postbus.send_batch(%s, %s::text[]{named(options)})"
        return list(self.value(query, to, list(payloads), *options.values()))

    def send_many(self, count: int, to: str = "q", key: str | None = None) -> list[int]:
        """m1, m2, ... in one transaction."""
        keys = None if key is None else [key] * count
        return self.send_all(*(f"m{i}" for i in range(1, count + 1)), to=to, keys=keys)

    def _work(self, query: str, *args: Any) -> list[Work]:
        with self.conn.cursor(row_factory=class_row(Work)) as cur:
            return cur.execute(query.encode(), args).fetchall()

    def receive(self, max: int = 100, of: str = "q", **options: Any) -> list[Work]:
        return self._work(
            f"select * from postbus.receive(%s, %s{named(options)})", of, max, *options.values()
        )

    def pop(self, max: int = 100, of: str = "q", **options: Any) -> list[Work]:
        return self._work(f"select * from postbus.pop(%s, %s{named(options)})", of, max, *options.values())

    def drain(self, max: int = 100, of: str = "q") -> list[str | None]:
        """Receive and ack until nothing comes; the payloads in order."""
        got: list[str | None] = []
        while page := self.receive(max, of):
            assert self.ack(*[m.receipt for m in page]) == len(page)
            got += told(page)
        return got

    def give_back(
        self, *receipts: str, delay: float | None = 0, reason: str | None = None, state: Any = None
    ) -> int:
        """nack, at once unless told otherwise."""
        query = "select postbus.nack(%s::text[], make_interval(secs => %s), %s, %s)"
        saved = None if state is None else Jsonb(state)
        return int(self.value(query, list(receipts), delay, reason, saved))

    def release(self, *receipts: str) -> int:
        return int(self.value("select postbus.release(%s::text[])", list(receipts)))

    def extend(self, *receipts: str, lease: str | None = None, state: Any = None) -> datetime | None:
        saved = None if state is None else Jsonb(state)
        end: datetime | None = self.value(
            "select postbus.extend(%s::text[], %s, %s)", list(receipts), lease, saved
        )
        return end

    def give_up(self, *receipts: str, reason: str | None = None) -> int:
        return int(self.value("select postbus.dead_letter(%s::text[], %s)", list(receipts), reason))

    def finish(self, verb: str, *receipts: str) -> object:
        """One of the verbs by name."""
        verbs: dict[str, Callable[..., object]] = {
            "ack": self.ack, "nack": self.give_back, "release": self.release, "extend": self.extend,
            "dead_letter": self.give_up,
        }  # fmt: skip
        return verbs[verb](*receipts)

    def everything(self) -> list[tuple[Any, ...]]:
        """All that a verb could change."""
        tables = ["queued", "queued_unlogged", "dead_letter", "archive", "lease"]
        return self.rows(
            " union all ".join(f"select to_jsonb(x) from postbus.{t} x" for t in tables) + " order by 1"
        )

    def die(self, times: int = 1, max: int = 100, of: str = "q") -> int:
        """Receive and never finish, so often; how many messages came in all."""
        return sum(self._died(max, of) for _ in range(times))

    def _died(self, max: int, of: str) -> int:
        n = len(self.receive(max, of, lease="1 second"))
        self.bus.wait(2)
        return n

    def peek(self, state: str | None = None, of: str = "q", **options: Any) -> list[dict[str, Any]]:
        query = f"select to_jsonb(p) from postbus.peek(%s, %s{named(options)}) p"
        return [dict(r[0]) for r in self.rows(query, of, state, *options.values())]

    def letters(self, of: str = "q") -> list[tuple[Any, ...]]:
        """Dead letters as (payload, attempt, reason)."""
        return self.rows("select payload, attempt, reason from postbus.dead_letters(%s) order by id", of)

    def look(self, of: str = "q") -> dict[str, Any]:
        """The row of list_queues."""
        return dict(self.value("select to_jsonb(l) from postbus.list_queues() l where name = %s", of))

    def sizes(self, of: str = "q") -> tuple[int, int, int]:
        """Ready, delayed, in flight."""
        row = self.look(of)
        return row["ready"], row["delayed"], row["in_flight"]


@dataclass
class Office(Bus):
    """A database with the engine, one clock, and sessions that are desks."""

    spare: list[psycopg.Connection[Any]] = field(default_factory=list)

    def session(self, **options: Any) -> Desk:
        if self.spare and not options:
            s = Desk(self, self.spare.pop())
        else:
            s = Desk(self, self.db.connect(options="-c lock_timeout=10s", **options))
        self._sessions.append(s)
        return s

    def clean(self) -> None:
        """Drop what there is. Connections are kept: a warm one spares a test more time than it takes."""
        for s in self._sessions:
            s.conn.rollback()
            s.rows("reset all")
        self.spare += [s.conn for s in self._sessions]
        self._sessions.clear()
        s = self.session()
        for kind in ["queue", "stream"]:
            s.rows(f"select postbus.drop_{kind}(name, true) from postbus.{kind}")
        s.maintain()
        self.spare.append(s.conn)
