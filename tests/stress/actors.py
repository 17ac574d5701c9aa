"""Producers and workers of the stress test: each does what it likes best by chance, all from one seed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import errors, sql

from tests.stress.oracle import (
    ABANDONED,
    ACKED,
    CRASHED,
    DEAD,
    LOST,
    NACKED,
    ROLLED_BACK,
    TAKEN_BACK,
    Delivery,
    Outcome,
    Sink,
)

Connection = psycopg.Connection[Any]

STREAM = "s"
SHARED_KEYS = 30
# Connections that were cut, by us or by the killer.
GONE = (psycopg.OperationalError, psycopg.InterfaceError)
# What a transaction has to expect that competes for row locks, at any isolation level.
CONTENTION = (errors.SerializationFailure, errors.DeadlockDetected)
LEASE_LOST = "PB004"

SETUP = """
create table counter (key text primary key, v bigint not null default 0);
create table published (uid text primary key, tx text not null, pos int not null, key text, seq bigint);
create table audit (
  n bigint generated always as identity, grp text not null, uid text not null, batch text not null);
create table died (grp text not null, uid text not null);
"""

PUBLISH = """
with c as (update counter set v = v + 1 where key = %(key)s returning v),
  p as (select c.v, postbus.publish(%(stream)s,
    jsonb_build_object('u', %(uid)s::text, 'k', %(key)s::text, 's', c.v), key => %(key)s) from c)
insert into published select %(uid)s, %(tx)s, %(pos)s, %(key)s, p.v from p
"""
PUBLISH_PLAIN = """
with p as (select postbus.publish(%(stream)s,
    jsonb_build_object('u', %(uid)s::text, 'k', %(key)s::text, 's', null),
    key => %(key)s, deliver_at => clock_timestamp() + %(delay)s::interval) as id)
insert into published select %(uid)s, %(tx)s, %(pos)s, %(key)s, null from p
"""
COUNT_UP = "update counter set v = v + 1 where key = %s returning v"
CONSUME = """
select id, key, payload, attempt, batch, receipt
from postbus.consume(%s, %s, %s, lease => %s::interval, worker => %s)
"""


def connect(dsn: str, role: str) -> Connection:
    conn = psycopg.connect(dsn, autocommit=True, application_name=f"stress {role}")
    conn.execute("set synchronous_commit = off")
    conn.execute("set deadlock_timeout = '20ms'")
    conn.execute("set statement_timeout = '60s'")
    return conn


def cut(conn: Connection) -> None:
    """Drop a connection without a word, as a machine that lost its network does."""
    conn.pgconn.finish()


@contextmanager
def contention(conn: Connection) -> Iterator[None]:
    """Roll back what lost a race for row locks."""
    try:
        yield
    except CONTENTION:
        conn.execute("rollback")


@dataclass
class Actor:
    """Somebody with a connection, a name and dice."""

    dsn: str
    name: str
    seed: int
    _conn: Connection | None = None
    count: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rnd = random.Random(f"{self.seed}/{self.name}")

    @property
    def conn(self) -> Connection:
        if self._conn is None or self._conn.closed or self._conn.pgconn.status != 0:
            self._conn = connect(self.dsn, self.name)
            self.prepare(self._conn)
        return self._conn

    def prepare(self, conn: Connection) -> None:
        """What a new connection of this actor needs."""

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def chance(self, p: float) -> bool:
        return self.rnd.random() < p

    def pause(self, most: float) -> None:
        time.sleep(self.rnd.random() * most)

    def tally(self, what: str, n: int = 1) -> None:
        self.count[what] = self.count.get(what, 0) + n


@dataclass
class Producer(Actor):
    """Transactions of any length, level and lock order; some roll back, in part or in whole, some are cut."""

    two_phase: bool = False
    _tx: int = 0
    _pos: int = 0
    _gid: str | None = None

    def prepare(self, conn: Connection) -> None:
        if self.two_phase:
            conn.execute("set postbus.notify = off")

    def step(self) -> None:
        """One transaction."""
        try:
            with contention(self.conn):
                self._transaction(self.conn)
        except GONE:
            self.tally("cut")
            self.close()
            self._recover()

    def _recover(self) -> None:
        """What a coordinator does that finds a prepared transaction of its own after a crash."""
        while self._gid is not None:
            verb = sql.SQL("commit" if self.chance(0.5) else "rollback")
            try:
                self.conn.execute(sql.SQL("{} prepared {}").format(verb, sql.Literal(self._gid)))
                self._gid = None
            except errors.UndefinedObject:  # it never was, or is finished
                self._gid = None
            except GONE:
                self.close()

    def _transaction(self, c: Connection) -> None:
        self._tx += 1
        self._pos = 0
        level = self.rnd.choice(["read committed", "read committed", "repeatable read", "serializable"])
        c.execute(sql.SQL("begin isolation level {}").format(sql.SQL(level)))
        if self.chance(0.3):
            # A transaction id from long before the first event; or only an old snapshot.
            c.execute("select pg_current_xact_id()" if self.chance(0.6) else "select count(*) from counter")
            self.pause(0.02)
        keys = self._keys()
        for key in keys:
            if self.chance(0.12):
                self._savepoint(c, key)
            self._one(c, key)
            if self.chance(0.08):
                self.pause(0.01)
        if self.chance(0.15):
            self._batch(c, keys)
        if self.chance(0.2):
            self._later(c)
        if self.chance(0.05):
            self.pause(0.15)
        self._end(c)

    def _keys(self) -> list[str | None]:
        n = self.rnd.choice([1, 1, 1, 2, 4, 15])
        keys: list[str | None] = [f"k{self.rnd.randrange(SHARED_KEYS)}" for _ in range(n)]
        if self.two_phase:
            # Most of them are its own: a prepared transaction keeps its row locks.
            keys = [k if self.chance(0.05) else f"{self.name}-{self.rnd.randrange(5)}" for k in keys]
        if self.chance(0.75):
            keys.sort(key=str)
        if self.chance(0.2):
            keys.insert(0, None)
        return keys

    def _args(self, key: str | None) -> dict[str, Any]:
        self._pos += 1
        return {
            "stream": STREAM,
            "key": key,
            "uid": f"{self.name}/{self._tx}/{self._pos}",
            "tx": f"{self.name}/{self._tx}",
            "pos": self._pos,
        }

    def _one(self, c: Connection, key: str | None) -> None:
        if key is None:
            c.execute(PUBLISH_PLAIN, {**self._args(None), "delay": None})
        else:
            c.execute(PUBLISH, self._args(key))
        self.tally("published")

    def _later(self, c: Connection) -> None:
        delay = f"{self.rnd.randrange(400)} milliseconds"
        c.execute(PUBLISH_PLAIN, {**self._args(f"later{self.rnd.randrange(5)}"), "delay": delay})
        self.tally("scheduled")

    def _savepoint(self, c: Connection, key: str | None) -> None:
        c.execute("savepoint a")
        self._one(c, key)
        if self.chance(0.5):
            c.execute("savepoint b")
            self._one(c, key)
            c.execute("rollback to savepoint b")
        if self.chance(0.6):
            c.execute("rollback to savepoint a")
        else:
            c.execute("release savepoint a")
        self.tally("savepoints")

    def _batch(self, c: Connection, keys: list[str | None]) -> None:
        args, payloads = [], []
        for key in keys:
            seq = None
            if key is not None:
                row = c.execute(COUNT_UP, [key]).fetchone()
                assert row is not None
                seq = int(row[0])
            a = {**self._args(key), "seq": seq}
            args.append(a)
            payloads.append(json.dumps({"u": a["uid"], "k": key, "s": seq}))
        c.execute(
            "select postbus.publish_batch(%s, %s::text[], keys => %s::text[])",
            [STREAM, payloads, [a["key"] for a in args]],
        )
        with c.cursor() as cur:
            cur.executemany("insert into published values (%(uid)s, %(tx)s, %(pos)s, %(key)s, %(seq)s)", args)
        self.tally("batches")

    def _end(self, c: Connection) -> None:
        if self.two_phase and self.chance(0.8):
            self._prepare_and_finish(c)
        elif self.chance(0.1):
            c.execute("rollback")
            self.tally("rollbacks")
        elif self.chance(0.03):
            cut(c)
            self.close()
            self.tally("cut")
        else:
            c.execute("commit")
            self.tally("commits")

    def _prepare_and_finish(self, c: Connection) -> None:
        self._gid = f"{c.info.dbname}/{self.name}/{self._tx}"
        gid = sql.Literal(self._gid)
        c.execute(sql.SQL("prepare transaction {}").format(gid))
        self.tally("prepared")
        self.pause(0.5)
        verb = sql.SQL("commit" if self.chance(0.7) else "rollback")
        c.execute(sql.SQL("{} prepared {}").format(verb, gid))
        self._gid = None


@dataclass(frozen=True)
class Got:
    """One message as a worker holds it."""

    id: int
    key: str | None
    uid: str
    attempt: int
    batch: str
    receipt: str


@dataclass
class Batch:
    """What one consume returned, and how long it is surely ours."""

    rows: list[Got]
    asked: float
    until: float
    open: dict[str, Got]

    @property
    def name(self) -> str:
        return self.rows[0].batch


class LeftError(Exception):
    """The rest of a batch was dealt with: by its loss, or on purpose."""


@dataclass
class Worker(Actor):
    """Consumes for one group and finishes what it got in every way there is."""

    group: str = ""
    ordering: str = "none"
    leases: tuple[float, ...] = (0.08, 0.3, 1.0)
    transactional: float = 0.3
    fragile: bool = False  # a group with few attempts: gives up on purpose too
    sink: Sink | None = None
    fault: Callable[[str], None] = lambda _: None
    on_batch: Callable[[], None] = lambda: None

    def step(self, calm: bool) -> bool:
        """One batch; calm: take it, ack it. False when there was nothing."""
        try:
            return self._well_behaved() if calm else self._random()
        except GONE:
            self.tally("cut")
            self.close()
            return True
        except CONTENTION as e:
            self.fault(f"{self.name}: {type(e).__name__} {e}")
            self.close()
            return True

    def _well_behaved(self) -> bool:
        b = self._consume(self.conn, 200, 3.0)
        if b:
            self._guarded(b, lambda: self._ack(b, list(b.open.values()), "batch", calm=True))
        return b is not None

    def _random(self) -> bool:
        size = self.rnd.choice([1, 2, 3, 10, 50])
        lease = self.rnd.choice(self.leases)
        if self.chance(self.transactional):
            return self._transactional(size, lease)
        b = self._consume(self.conn, size, lease)
        if b is None:
            return False
        self._guarded(b, lambda: self._deal(b))
        return True

    # Consuming.

    def _consume(self, c: Connection, size: int, lease: float) -> Batch | None:
        asked = time.monotonic()
        rows = c.execute(CONSUME, [STREAM, self.group, size, f"{lease} seconds", self.name]).fetchall()
        got = time.monotonic()
        if not rows:
            return None
        if len(rows) > size:
            self.fault(f"{self.name}: asked for {size}, got {len(rows)}")
        out = []
        for id_, key, payload, attempt, batch, receipt in rows:
            body = json.loads(payload)
            if body["k"] != key:
                self.fault(f"{self.name}: key {key} of {payload}")
            out.append(Got(id_, key, body["u"], attempt, batch, receipt))
            assert self.sink is not None
            self.sink.delivery(
                Delivery(self.group, self.name, batch, body["u"], key, body["s"], attempt, asked, got, lease)
            )
        if len({m.batch for m in out}) != 1 or (
            self.ordering != "none" and sorted(out, key=lambda m: m.id) != out
        ):
            self.fault(f"{self.name}: mixed or unsorted batch {[(m.batch, m.id) for m in out]}")
        self.tally("batches")
        self.tally("deliveries", len(out))
        self.on_batch()
        return Batch(out, asked, asked + lease, {m.uid: m for m in out})

    def _transactional(self, size: int, lease: float) -> bool:
        """Consume, publish and ack in one transaction, which may have an xid before and may roll back."""
        c = self.conn
        c.execute("begin")
        if self.chance(0.6):
            c.execute("select pg_current_xact_id()")
            self.pause(0.005)
        mine = 0
        if self.chance(0.3):
            mine += 1
            self._follow_up(c, mine)
        b = self._consume(c, size, lease)
        if b is None:
            c.execute("commit")
            return mine > 0
        while self.chance(0.4):
            mine += 1
            self._follow_up(c, mine)
        self.pause(0.01)
        try:
            if self.chance(0.12):
                c.execute("rollback")
                self._settle(b, list(b.open.values()), ROLLED_BACK)
                self.tally("rollbacks")
            elif self.chance(0.05):
                cut(c)
                self._settle(b, list(b.open.values()), CRASHED)
                self.close()
                self.tally("cut")
            elif self.chance(0.25):
                c.execute("commit")
                self._guarded(b, lambda: self._deal(b))
            else:
                if self.chance(0.2):
                    self._extend(c, b)
                started = time.monotonic()
                self._audit(c, b, list(b.open.values()))
                c.execute("commit")
                self._settle(b, list(b.open.values()), ACKED, started)
        except GONE:
            self._settle(b, list(b.open.values()), CRASHED)
            raise
        return True

    def _follow_up(self, c: Connection, n: int) -> None:
        uid = f"{self.name}/{time.monotonic_ns()}/{n}"
        args = {"stream": STREAM, "key": f"own-{self.name}", "uid": uid, "tx": uid, "pos": n}
        c.execute(PUBLISH, args)
        self.tally("follow-ups")

    # Finishing.

    def _guarded(self, b: Batch, deal: Callable[[], None]) -> None:
        """Whatever happens to the batch, say what became of every message."""
        started = time.monotonic()
        try:
            deal()
        except LeftError:
            pass
        except GONE:
            self._settle(b, list(b.open.values()), CRASHED, started)
            raise
        except psycopg.Error as e:
            if e.sqlstate != LEASE_LOST:
                raise
            ended = time.monotonic()
            if self.conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                self.conn.execute("rollback")
            if ended < b.until:
                self.fault(f"{self.name}: lease of {b.name} lost {b.until - ended:.3f} s early: {e}")
            self._settle(b, list(b.open.values()), LOST, started)
            self.tally("lost")

    def _settle(self, b: Batch, rows: list[Got], what: str, started: float | None = None) -> None:
        ended = time.monotonic()
        for m in rows:
            assert self.sink is not None
            self.sink.outcome(Outcome(self.group, m.batch, m.uid, what, started or ended, ended, b.until))
            b.open.pop(m.uid, None)

    def _audit(self, c: Connection, b: Batch, rows: list[Got], how: str = "batch") -> None:
        """Ack and its audit rows, in the caller's transaction."""
        if how == "batch":
            query, arg = "select postbus.ack(%s::text)", b.name
        else:
            query, arg = "select postbus.ack(%s::text[])", [m.receipt for m in rows]  # type: ignore[assignment]
        row = c.execute(query, [arg]).fetchone()
        if row is None or row[0] != len(rows):
            self.fault(f"{self.name}: ack of {len(rows)} messages of {b.name} returned {row}")
        c.execute(
            "insert into audit (grp, uid, batch)"
            " select %s, u, %s from unnest(%s::text[]) with ordinality x(u, o) order by o",
            [self.group, b.name, [m.uid for m in rows]],
        )

    def _ack(self, b: Batch, rows: list[Got], how: str, calm: bool = False) -> None:
        if not rows:
            return
        c = self.conn
        started = time.monotonic()
        c.execute("begin")
        self._audit(c, b, rows, how)
        if self.chance(0.1):
            self.pause(0.005)
        if not calm and self.chance(0.02):
            cut(c)
            self.close()
            self._settle(b, list(b.open.values()), CRASHED, started)
            raise LeftError
        c.execute("commit")
        self._settle(b, rows, ACKED, started)

    def _ack_all(self, b: Batch) -> None:
        self._ack(b, list(b.open.values()), "batch")

    def _deal(self, b: Batch) -> None:
        self.pause(0.01)
        way = self.rnd.choices(
            [
                self._ack_all,
                self._ack_some,
                self._nack_one,
                self._leave,
                self._be_late,
                self._prolong,
                self._give_up,
            ],
            [30, 20, 20, 6, 6, 10, 4 if self.fragile else 0],
        )[0]
        way(b)

    def _ack_some(self, b: Batch) -> None:
        """In pieces, in order; sometimes the rest is left to expire."""
        while b.open:
            rows = list(b.open.values())
            some = rows[: self.rnd.randint(1, len(rows))]
            if self.chance(0.1):
                self._leave(b)
                return
            self._ack(b, some, "receipts")

    def _nack_one(self, b: Batch) -> None:
        """Ack what comes before, give one back, ack what does not wait behind it."""
        rows = list(b.open.values())
        i = self.rnd.randrange(len(rows))
        if i > 0:
            self._ack(b, rows[:i], "receipts")
        bad = rows[i]
        later = rows[i + 1 :]
        behind = [
            m
            for m in later
            if self.ordering == "stream"
            or (self.ordering == "key" and m.key is not None and m.key == bad.key)
        ]
        delay = self.rnd.choice([None, "0 seconds", "20 milliseconds", "100 milliseconds"])
        started = time.monotonic()
        self.conn.execute(
            "select postbus.nack(%s::text, %s::interval, %s)", [bad.receipt, delay, "try again"]
        )
        self._settle(b, [bad], NACKED, started)
        self._settle(b, behind, TAKEN_BACK, started)
        self.tally("nacks")
        rest = list(b.open.values())
        self._ack(b, rest, self.rnd.choice(["batch", "receipts"]))

    def _leave(self, b: Batch) -> None:
        self._settle(b, list(b.open.values()), ABANDONED)
        self.tally("abandoned")

    def _be_late(self, b: Batch) -> None:
        """Sleep past the lease, then ack all the same."""
        if b.until - time.monotonic() > 0.4:
            self._leave(b)
            return
        time.sleep(max(0.0, b.until - time.monotonic()) + self.rnd.choice([0.0, 0.02, 0.1]))
        self.tally("late acks")
        self._ack_all(b)

    def _prolong(self, b: Batch) -> None:
        self._extend(self.conn, b)
        self.pause(0.05)
        self._ack_all(b)

    def _extend(self, c: Connection, b: Batch) -> None:
        started = time.monotonic()
        lease = b.until - b.asked + 0.3
        c.execute("select postbus.extend(%s::text, %s::interval)", [b.name, f"{lease} seconds"])
        b.until = started + lease
        self.tally("extends")

    def _give_up(self, b: Batch) -> None:
        rows = list(b.open.values())
        started = time.monotonic()
        self.conn.execute("select postbus.dead_letter(%s::text, %s)", [rows[0].receipt, "no use"])
        self._settle(b, rows[:1], DEAD, started)
        self.tally("given up")
        self._ack(b, rows[1:], "receipts")
