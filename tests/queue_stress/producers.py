"""Producers: transactions that send, all by chance from one seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psycopg import errors, sql

from tests.queue_stress import ledger
from tests.stress.actors import GONE, Actor, Connection, cut

TOPIC = "t"
# Keys of the queue "keyed" and the policies that they keep until the end: concurrency, rate, burst.
FIXED: dict[str, tuple[int | None, float | None, int | None]] = {
    "one": (1, None, None),
    "line": (1, None, None),
    "three": (3, None, None),
    "slow": (None, 40.0, 3),
    "slow line": (1, 60.0, 2),
}
LOOSE = ["a", "b", "c", "d", "e"]
KEYS: dict[str, list[str | None]] = {
    "plain": [None, None, "a"],
    "mixed": [None, "a", "b"],
    "keyed": [*FIXED, *FIXED, *LOOSE, None],
    "late": [None, *LOOSE],
    "fast": [None, "a"],
}
PRIORITIES = {
    "plain": [0],
    "mixed": range(10),
    "keyed": [0, 0, 0, 0, 0, 0, 4],
    "late": [0, 1],
    "fast": [0, 0, 2],
}
QUEUES = list(KEYS)

SEND = """
select postbus.send(%(queue)s, %(uid)s::text, type => %(type)s, key => %(key)s, priority => %(priority)s,
  delay => %(delay)s::interval, ttl => %(ttl)s::interval, dedupe_key => %(dedupe)s)
"""


@dataclass
class Sent:
    """What producers know for sure, for others to use."""

    committed: dict[str, Any] = field(default_factory=dict)  # transaction: a time after its commit
    ids: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Producer(Actor):
    """Transactions of any length and level; some roll back, in part or in whole, some are cut."""

    queues: list[str] = field(default_factory=lambda: QUEUES)
    sent: Sent = field(default_factory=Sent)
    dedupes: int = 40
    _tx: int = 0
    _pos: int = 0
    _ids: list[tuple[str, int]] = field(default_factory=list)

    def step(self) -> None:
        """One transaction."""
        try:
            self._transaction(self.conn)
        except GONE:
            self.tally("cut")
            self.close()
        except errors.SerializationFailure:  # two with one dedupe key, above READ COMMITTED
            self.conn.execute("rollback")

    def _transaction(self, c: Connection) -> None:
        self._tx += 1
        self._pos = 0
        self._ids = []
        level = self.rnd.choice(["read committed", "read committed", "repeatable read", "serializable"])
        c.execute(sql.SQL("begin isolation level {}").format(sql.SQL(level)))
        if self.chance(0.2):
            c.execute("select count(*) from sent")
            self.pause(0.02)
        queue = self.rnd.choice(self.queues)
        for _ in range(self.rnd.choice([1, 1, 1, 2, 4, 12])):
            if self.chance(0.1):
                self._savepoint(c, queue)
            self._one(c, queue if self.chance(0.8) else self.rnd.choice(self.queues))
            if self.chance(0.08):
                self.pause(0.01)
        if self.chance(0.15):
            self._batch(c, queue)
        if self.chance(0.08) and "plain" in self.queues and "mixed" in self.queues:
            self._topic(c)
        if self.chance(0.05):
            self._one(c, queue, f"d{self.rnd.randrange(self.dedupes)}")
        if self.chance(0.05):
            self.pause(0.1)
        self._end(c)

    @property
    def tx(self) -> str:
        return f"{self.name}/{self._tx}"

    def _uid(self) -> str:
        self._pos += 1
        return f"{self.tx}/{self._pos}"

    def _written(self, c: Connection, queue: str, ids: list[int], dedupe: str | None = None) -> None:
        n = c.execute(ledger.SENT, {"queue": queue, "tx": self.tx, "ids": ids, "dedupe": dedupe}).rowcount
        if dedupe is None and n != len(ids):
            raise AssertionError(f"{queue}: {ids} were sent, {n} are there")
        self._ids += [(queue, i) for i in ids]
        self.tally("sent", n)

    def _one(self, c: Connection, queue: str, dedupe: str | None = None) -> None:
        args = {
            "queue": queue,
            "uid": self._uid(),
            "type": self.rnd.choice(["x", "y"]),
            "key": self.rnd.choice(KEYS[queue]),
            "priority": self.rnd.choice(PRIORITIES[queue]),
            "delay": f"{self.rnd.randrange(200)} ms" if self.chance(0.1) else None,
            "ttl": f"{self.rnd.randrange(50, 300)} ms" if self.chance(0.05) else None,
            "dedupe": dedupe,
        }
        row = c.execute(SEND, args).fetchone()
        assert row is not None
        self._written(c, queue, [row[0]], dedupe)

    def _batch(self, c: Connection, queue: str) -> None:
        uids = [self._uid() for _ in range(self.rnd.choice([1, 5, 30]))]
        keys = [self.rnd.choice(KEYS[queue]) for _ in uids]
        row = c.execute(
            "select postbus.send_batch(%s, %s::text[], keys => %s::text[], priority => %s)",
            [queue, uids, keys, self.rnd.choice(PRIORITIES[queue])],
        ).fetchone()
        assert row is not None
        self._written(c, queue, row[0])

    def _topic(self, c: Connection) -> None:
        rows = c.execute("select * from postbus.send_topic(%s, %s::text)", [TOPIC, self._uid()]).fetchall()
        assert sorted(r[0] for r in rows) == ["mixed", "plain"]
        for queue, id_ in rows:
            self._written(c, queue, [id_])

    def _savepoint(self, c: Connection, queue: str) -> None:
        before = list(self._ids)
        c.execute("savepoint a")
        self._one(c, queue)
        if self.chance(0.6):
            c.execute("rollback to savepoint a")
            self._ids = before
        else:
            c.execute("release savepoint a")
        self.tally("savepoints")

    def _end(self, c: Connection) -> None:
        if self.chance(0.1):
            c.execute("rollback")
            self.tally("rollbacks")
        elif self.chance(0.03):
            cut(c)
            self.close()
            self.tally("cut")
        else:
            c.execute("commit")
            row = c.execute("select clock_timestamp()").fetchone()
            assert row is not None
            self.sent.committed[self.tx] = row[0]
            self.sent.ids += self._ids
            self.tally("commits")
