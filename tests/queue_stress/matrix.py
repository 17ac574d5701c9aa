"""Two sessions do two steps each, in opposite orders: who waits for whom, and does it end?"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[Any]

QUEUE = "q"
SETTLE = ("ack", "nack", "release", "extend", "dead_letter")
KEYS = ["a", "b"]
DEADLOCK = "40P01"
# The second step may find that the first step of the other has finished its message, or has not yet.
EXPECTED = {"PB004", "PB001"}


@dataclass
class Side:
    """One of the two sessions, and the messages that are its own to settle."""

    name: str
    conn: Connection
    receipts: dict[str, list[str]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)


Verb = Callable[[Side], object]


def call(query: str, *args: Any) -> Verb:
    return lambda s: s.conn.execute(f"select * from postbus.{query}".encode(), args)


def settle(query: str) -> Verb:
    """A verb on receipts, newest first: the engine has to put them in order."""
    verb = query.split("(", maxsplit=1)[0]
    return lambda s: s.conn.execute(f"select postbus.{query}".encode(), [s.receipts[verb][::-1]])


VERBS: dict[str, Verb] = {
    "send": call("send(%s, 'm', key => 'a', priority => 3)", QUEUE),
    "send_batch": call("send_batch(%s, %s::text[], keys => %s::text[])", QUEUE, ["m", "n"], KEYS[::-1]),
    "receive": call("receive(%s, 100)", QUEUE),
    "pop": call("pop(%s, 100)", QUEUE),
    "ack": settle("ack(%s::text[])"),
    "nack": settle("nack(%s::text[])"),
    "release": settle("release(%s::text[])"),
    "extend": settle("extend(%s::text[], '1 hour')"),
    "dead_letter": settle("dead_letter(%s::text[])"),
    "cancel": lambda s: s.conn.execute("select postbus.cancel(%s, %s::bigint[])", [QUEUE, s.ids[::-1]]),
    "purge_queue": call("purge_queue(%s)", QUEUE),
    "redrive": call("redrive(%s)", QUEUE),
    "set_key_policy": call("set_key_policy(%s, 'a', concurrency => 100)", QUEUE),
    "set_default_policy": call("set_key_policy(%s, concurrency => 100)", QUEUE),
    "unset_key_policy": call("unset_key_policy(%s, 'a')", QUEUE),
    "alter_queue": call("alter_queue(%s, %s)", QUEUE, Jsonb({"lease": 20})),
    "pause": call("pause(%s)", QUEUE),
    "maintain": call("maintain()"),
    "bind": call("bind(%s, 'x.*')", QUEUE),
    "bind_stream": call("bind(%s, 'y.*', 's')", QUEUE),
    "publish": call("publish('s', 'e', type => 'x', key => 'a')"),
    "send_topic": call("send_topic('t', 'm', key => 'a')"),
    "schedule": lambda s: s.conn.execute(
        "select postbus.schedule(%s, '* * * * *', %s)", [f"schedule-{s.name}", QUEUE]
    ),
}


def prepare(c: Connection, keyed: bool) -> None:
    """Once for each database: the objects that everybody works on."""
    c.execute("select postbus.create_queue(%s)", [QUEUE])
    c.execute("select postbus.create_stream('s')")
    c.execute("select postbus.create_group('s', 'g')")
    c.execute("select postbus.bind(%s, 't'), postbus.bind(%s, '#', 's')", [QUEUE, QUEUE])
    for name in ["schedule-x", "schedule-y"]:
        c.execute("select postbus.schedule(%s, '* * * * *', %s)", [name, QUEUE])
    if keyed:
        c.execute("select postbus.set_key_policy(%s, concurrency => 100)", [QUEUE])


def reset(c: Connection, keyed: bool, x: Side, y: Side) -> None:
    """Before each pair: expired leases and waiting messages of both sides, dead letters, work for upkeep."""
    c.execute("select postbus.purge_queue(%s), postbus.purge_dead_letters(%s, '0 s')", [QUEUE, QUEUE])
    for queue, stream, pattern in c.execute("select * from postbus.list_bindings()").fetchall():
        if pattern in ("x.*", "y.*"):
            c.execute("select postbus.unbind(%s, %s, %s)", [queue, pattern, stream])
    c.execute("select postbus.resume(%s)", [QUEUE])
    if keyed:
        c.execute("select postbus.set_key_policy(%s, 'a', concurrency => 100)", [QUEUE])
    c.execute("select postbus.dead_letter(%s::text[])", [_taken(c, 2, "1 h")])
    # All of these leases are over: a claim may take the messages, and they may still be settled.
    each = 2 * len(SETTLE)
    receipts = _taken(c, 2 * each, "1 us")
    for n, s in enumerate((x, y)):
        s.receipts = {v: receipts[each * n + 2 * i :][:2] for i, v in enumerate(SETTLE)}
        s.ids = _sent(c, 2)
    c.execute("select postbus.send(%s, 'm', key => 'a', ttl => '1 us')", [QUEUE])
    c.execute("update postbus.schedule set next_at = now() - interval '1 s'")
    c.execute("select postbus.publish('s', 'e', type => 'x')")


def _sent(c: Connection, n: int) -> list[int]:
    keys = [KEYS[i % 2] for i in range(n)]
    row = c.execute(
        "select postbus.send_batch(%s, array_fill('m'::text, array[%s]), keys => %s::text[])",
        [QUEUE, n, keys],
    ).fetchone()
    assert row is not None
    return list(row[0])


def _taken(c: Connection, n: int, lease: str) -> list[str]:
    """Receipts of so many new messages, the keys in turn."""
    ids = _sent(c, n)
    rows = c.execute(
        "select id, receipt from postbus.receive(%s, 100, %s::interval)", [QUEUE, lease]
    ).fetchall()
    assert sorted(r[0] for r in rows) == ids
    return [receipt for _, receipt in sorted(rows)]


@dataclass
class Outcome:
    """What came of a pair: waits are (verbs that the holder had done or begun, the verb that waited)."""

    waits: set[tuple[tuple[str, ...], str]] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)


class Duel:
    """X does A, then B; Y does B, then A. The second steps begin when both first steps are done, or wait."""

    def __init__(self, watch: Connection, x: Side, y: Side) -> None:
        self.watch = watch
        self.sides = (x, y)
        self.done: dict[str, list[str]] = {}
        self.outcome = Outcome()

    def run(self, a: str, b: str) -> Outcome:
        self.outcome = Outcome()
        x, y = self.sides
        self.done = {x.name: [], y.name: []}
        with ThreadPoolExecutor(2) as pool:
            x.conn.execute("begin")
            y.conn.execute("begin")
            first_x = self._begin(pool, x, a)
            self._settle([(x, a, first_x)])
            self._finish(x, a, first_x, commit=False)
            first_y = self._begin(pool, y, b)
            waiting = self._settle([(y, b, first_y)])
            if not waiting:
                self._finish(y, b, first_y, commit=False)
            second_x = self._begin(pool, x, b)
            if waiting:
                self._settle([(x, b, second_x), (y, b, first_y)])
                self._finish(x, b, second_x)
                self._finish(y, b, first_y, commit=False)
                second_y = self._begin(pool, y, a)
            else:
                second_y = self._begin(pool, y, a)
                self._settle([(x, b, second_x), (y, a, second_y)])
                # Whoever is through commits, and lets the other one go on.
                if not second_x.done():
                    self._finish(y, a, second_y)
                self._finish(x, b, second_x)
            self._finish(y, a, second_y)
        return self.outcome

    def _begin(self, pool: ThreadPoolExecutor, side: Side, verb: str) -> Future[object]:
        self.done[side.name].append(verb)
        if side.conn.info.transaction_status != psycopg.pq.TransactionStatus.INTRANS:
            return pool.submit(lambda: None)  # its first step has failed, and freed what it held
        return pool.submit(VERBS[verb], side)

    def _settle(self, calls: list[tuple[Side, str, Future[object]]]) -> bool:
        """Until each has ended or waits for a lock. True if any waits."""
        end = time.monotonic() + 20
        while True:
            open_ = [(s, v) for s, v, f in calls if not f.done()]
            waiting = [(s, v) for s, v in open_ if self._blocked(s)]
            if len(waiting) == len(open_):
                break
            assert time.monotonic() < end, f"{open_} neither end nor wait"
        for side, verb in waiting:
            other = self.sides[1 - self.sides.index(side)]
            self.outcome.waits.add((tuple(self.done[other.name]), verb))
        return bool(waiting)

    def _blocked(self, side: Side) -> bool:
        row = self.watch.execute(
            "select cardinality(pg_blocking_pids(%s)) > 0", [side.conn.info.backend_pid]
        ).fetchone()
        return row == (True,)

    def _finish(self, side: Side, verb: str, future: Future[object], commit: bool = True) -> None:
        try:
            future.result(20)
        except psycopg.Error as e:
            self.outcome.errors[f"{side.name} {verb}"] = e.sqlstate or str(e)
        status = side.conn.info.transaction_status
        if status == psycopg.pq.TransactionStatus.INERROR:
            side.conn.execute("rollback")
        elif commit and status == psycopg.pq.TransactionStatus.INTRANS:
            side.conn.execute("commit")
