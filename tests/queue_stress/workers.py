"""Workers: they receive, and finish what they got in every way there is."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.queue_stress import ledger
from tests.queue_stress.ledger import Got
from tests.stress.actors import GONE, LEASE_LOST, Actor, Connection, cut


class DoneError(Exception):
    """The rest was dealt with on purpose."""


@dataclass
class Worker(Actor):
    """Receives from one queue and finishes what it got in every way there is."""

    queue: str = ""
    leases: tuple[float, ...] = (0.08, 0.3, 1.0)
    transactional: float = 0.25
    seen: set[int] = field(default_factory=set)  # also by transactions that rolled back

    def fault(self, text: str) -> None:
        self.conn.execute("rollback")
        self.conn.execute("insert into fault values (%s)", [f"{self.name}: {text}"])

    def step(self, calm: bool) -> bool:
        """One batch; calm: take it, ack it. False when there was nothing."""
        try:
            return self._well_behaved() if calm else self._random()
        except GONE:
            self.tally("cut")
            self.close()
        except (psycopg.Error, AssertionError):
            # Also deadlocks and serialization failures: a worker must not meet them.
            self.fault(traceback.format_exc(limit=-3))
        return True

    def _take(self, c: Connection, size: int, lease: float) -> list[Got]:
        """In a transaction that is open."""
        kind = self.rnd.choice([None, None, None, "x"])
        rows = ledger.receive(c, self.queue, self.name, size, lease, kind)
        self.seen |= {g.id for g in rows}
        if rows:
            self.tally("batches")
            self.tally("deliveries", len(rows))
        return rows

    def _well_behaved(self) -> bool:
        c = self.conn
        c.execute("begin")
        rows = ledger.receive(c, self.queue, self.name, 100, 5.0)
        c.execute("commit")
        if rows:
            self._end(rows, ledger.ACK, calm=True)
            self.tally("deliveries", len(rows))
        return bool(rows)

    def _random(self) -> bool:
        c = self.conn
        size = self.rnd.choice([1, 1, 2, 3, 10, 40])
        if self.chance(0.05):
            return self._pop(c, size)
        c.execute("begin")
        if self.chance(0.2):
            c.execute("select pg_current_xact_id()")
        rows = self._take(c, size, self.rnd.choice(self.leases))
        if self.chance(self.transactional):
            return self._inside(c, rows)
        if self.chance(0.02):
            cut(c)
            self.close()
            return True
        if self.chance(0.04):
            c.execute("rollback")  # and the receipts are worth nothing: others get the same
            return bool(rows)
        c.execute("commit")
        if not rows:
            return False
        try:
            self._deal(rows)
        except DoneError:
            pass
        except psycopg.Error as e:
            if e.sqlstate != LEASE_LOST:
                raise
            self._lost(rows)
        return True

    def _lost(self, rows: list[Got]) -> None:
        """PB004: only fair when a lease has run out. Ours were all of one length."""
        c = self.conn
        c.execute("rollback")
        row = c.execute("select clock_timestamp() < %s", [min(g.due for g in rows)]).fetchone()
        left = c.execute(
            "select count(*) from delivered d join unnest(%s::bigint[], %s::int[]) g (id, claim)"
            " using (id, claim) where not exists (select from ended e"
            " where e.id = d.id and e.claim = d.claim and e.what <> 'extend')",
            [[g.id for g in rows], [g.claim for g in rows]],
        ).fetchone()
        if row == (True,) and left == (len(rows),):
            self.fault(f"leases lost early: {rows}")
        self.tally("lost")

    def _inside(self, c: Connection, rows: list[Got]) -> bool:
        """What was received is finished in the same, longer transaction."""
        self.pause(0.02)
        if self.chance(0.1):
            c.execute("rollback")
            self.tally("rollbacks")
        elif self.chance(0.05):
            cut(c)
            self.close()
        else:
            if rows and self.chance(0.9):
                self._call(c, rows, self.rnd.choice([ledger.ACK, ledger.ACK, ledger.NACK, ledger.EXTEND]))
            if self.chance(0.3):
                rows += self._take(c, 2, 0.3)
            c.execute("commit")
            self.tally("transactional")
        return bool(rows)

    def _pop(self, c: Connection, size: int) -> bool:
        c.execute("begin")
        rows = c.execute(
            "select statement_timestamp(), id, receipt from postbus.pop(%s, %s)", [self.queue, size]
        ).fetchall()
        self.seen |= {r[1] for r in rows}
        if rows:
            ended = [(r[1], ledger.claim_of(r[2])) for r in rows]
            ledger.note(c, self.queue, ledger.POP, rows[0][0], ended)
        c.execute("rollback" if self.chance(0.1) else "commit")
        self.tally("popped", len(rows))
        return bool(rows)

    # Finishing.

    def _call(self, c: Connection, rows: list[Got], what: str) -> None:
        receipts = [g.receipt for g in rows]
        self.rnd.shuffle(receipts)
        delay = self.rnd.choice([None, "0 s", "20 ms", "80 ms"])
        lease = f"{self.rnd.choice(self.leases) + 0.2} s"
        calls: dict[str, tuple[str, list[Any]]] = {
            ledger.ACK: ("ack(%s::text[])", []),
            ledger.NACK: ("nack(%s::text[], %s::interval, 'again', %s)", [delay, Jsonb({"by": self.name})]),
            ledger.DEAD: ("dead_letter(%s::text[], 'no use')", []),
            ledger.EXTEND: ("extend(%s::text[], %s::interval)", [lease]),
        }
        call, more = calls[what]
        one = len(receipts) == 1 and self.chance(0.5)
        query = f"select statement_timestamp(), postbus.{call.replace('text[]', 'text') if one else call}"
        row = c.execute(query.encode(), [receipts[0] if one else receipts, *more]).fetchone()
        assert row is not None
        if what != ledger.EXTEND and row[1] != len(rows):
            raise AssertionError(f"{what} of {len(rows)} returned {row[1]}")
        ledger.note(c, self.queue, what, row[0], [(g.id, g.claim) for g in rows])
        self.tally(what, len(rows))

    def _end(self, rows: list[Got], what: str, calm: bool = False) -> None:
        if not rows:
            return
        c = self.conn
        c.execute("begin")
        self._call(c, rows, what)
        if self.chance(0.1):
            self.pause(0.005)
        if not calm and self.chance(0.02):
            cut(c)
            self.close()
            raise DoneError
        c.execute("commit")

    def _deal(self, rows: list[Got]) -> None:
        self.pause(0.01)
        ways: list[tuple[Callable[[list[Got]], None], int]] = [
            (lambda r: self._end(r, ledger.ACK), 30),
            (self._piece_by_piece, 20),
            (self._nack_and_ask_again, 20),
            (lambda r: None, 6),
            (self._be_late, 6),
            (self._prolong, 10),
            (lambda r: self._end(r, ledger.DEAD), 3),
        ]
        self.rnd.choices([w[0] for w in ways], [w[1] for w in ways])[0](rows)

    def _piece_by_piece(self, rows: list[Got]) -> None:
        """Some are finished, in any order; some are left to expire."""
        rows = self.rnd.sample(rows, len(rows))
        while rows:
            if self.chance(0.1):
                return
            n = self.rnd.randint(1, len(rows))
            self._end(rows[:n], self.rnd.choice([ledger.ACK, ledger.ACK, ledger.NACK]))
            rows = rows[n:]

    def _nack_and_ask_again(self, rows: list[Got]) -> None:
        """After a nack or an ack, the same receipts are worth nothing."""
        n = self.rnd.randint(1, len(rows))
        first = self.rnd.choice([ledger.NACK, ledger.NACK, ledger.ACK])
        self._end(rows[:n], first)
        again = self.rnd.choice([ledger.ACK, ledger.NACK, ledger.EXTEND, ledger.DEAD])
        c = self.conn
        try:
            c.execute("begin")
            self._call(c, rows[:1], again)
            c.execute("commit")
        except psycopg.Error as e:
            if e.sqlstate != LEASE_LOST:
                raise
            c.execute("rollback")
            self.tally("late receipts")
        else:
            raise AssertionError(f"{again} of {rows[0]} after its {first}")
        self._end(rows[n:], ledger.ACK)

    def _be_late(self, rows: list[Got]) -> None:
        row = self.conn.execute(
            "select extract(epoch from %s - clock_timestamp())", [max(g.due for g in rows)]
        ).fetchone()
        assert row is not None
        if row[0] < 0.4:
            time.sleep(max(0.0, float(row[0])) + self.rnd.choice([0.0, 0.02, 0.1]))
            self._end(rows, self.rnd.choice([ledger.ACK, ledger.EXTEND, ledger.NACK]))

    def _prolong(self, rows: list[Got]) -> None:
        self._end(rows, ledger.EXTEND)
        self.pause(0.1)
        self._end(rows, ledger.ACK)
