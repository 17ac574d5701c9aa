# Generated from ../_async/_settler.py by tools/gen_sync.py ("make format"): edit that one.
"""Telling the database what became of messages, many at a time, and keeping their leases until then.

Outcomes are gathered for a few milliseconds and told in one call per verb. Leases are extended after a third
of their time. What the database refuses for one message does not keep the others from it. A connection that
breaks is made again, for ever.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg.errors import LockNotAvailable

from postbus._telemetry import count
from postbus.client import _sql
from postbus.client._compat import Event, log, sleep
from postbus.client._ledger import Ledger
from postbus.client._outcome import ACK, Outcome, statement
from postbus.client._sync._bus import Bus
from postbus.errors import LeaseLost, PostbusError

R = TypeVar("R")

_COUNTERS = {"ack": "acked_total", "nack": "nacked_total", "dead_letter": "nacked_total"}

LINGER = 0.005  # how long outcomes are gathered
PARTIAL = 0.5  # parts of a page of a stream are settled after so long; the whole page at once is cheaper
IDLE = 1.0  # how long to wait for something to do before looking anyway
CLOSING = 0.05  # the same while the consumer closes


class Settler:
    """The settling side of a consumer.

    Args:
        bus: where to.
        label: where the messages come from, for the log.
        ledger: what is to be told.
        conn: tell it on this connection, as part of its transaction. Then nothing runs in the background, and
            every error is raised.

    Attributes:
        lease: seconds, for extensions.
        closing: nothing more is begun.
        give_up_at: when to stop trying again, or None.
        locked: something could not be told, because a transaction that is still open has locked it.
        some: an event: there are outcomes.
        enough: an event: it is no use to wait for more of them.
    """

    def __init__(self, bus: Bus, label: str, ledger: Ledger[Any], conn: object | None = None) -> None:
        self.lease = 30.0
        self.closing = False
        self.locked = False
        self.give_up_at: float | None = None
        self.some = Event()
        self.enough = Event()
        self._bus = bus
        self._label = label
        self._ledger = ledger
        self._conn = conn
        self._asked: dict[object, float] = {}  # when, for what has no answer yet
        self._unsure = False  # whether what is told now may have been told before

    def run(self, ends: Callable[[], bool], lost: Callable[[set[str]], None]) -> None:
        """Tell and extend until `ends`; `lost` is called with what was lost while somebody worked on it."""
        while True:
            self.some.wait_for(self._until_next())
            self.some.clear()
            if self._ledger.pending and not self.closing:
                self.enough.wait_for(LINGER)
            self.enough.clear()
            try:
                self.flush()
                self.keep(lost)
            except Exception as exc:
                if self.give_up_at is None:
                    log.exception("%s: could not settle messages", self._label)
                    sleep(IDLE)
                else:
                    log.warning("%s: could not settle messages, they come again: %s", self._label, brief(exc))
                    return
            if ends():
                return
            if self._too_late():
                log.warning("%s: messages stayed locked, they come again", self._label)
                return

    def _until_next(self) -> float:
        """When to look without being told to."""
        if self.closing:
            return CLOSING
        return min(PARTIAL / 2 if self._ledger.partly_acked() else IDLE, self.lease / 6)

    def _too_late(self) -> bool:
        return self.give_up_at is not None and time.monotonic() > self.give_up_at

    def flush(self) -> None:
        """Tell the outcomes there are. Acks of a page that is partly done wait for the rest, up to a time."""
        self._unsure = self.locked = False
        for outcome, receipts in self._ledger.failures().items():
            self._finish(outcome, receipts)
        everything = self.closing or self._conn is not None
        acks, pages = self._ledger.acks(float("inf") if everything else time.monotonic() - PARTIAL)
        if acks:
            self._finish(ACK, acks)
        if pages:
            self._finish(ACK, list(pages), pages)

    def _finish(self, outcome: Outcome, tokens: list[str], named: dict[str, list[str]] | None = None) -> None:
        """Settle by receipts, or by tokens; then `named` has the receipts that each stands for."""

        def receipts_of(some: list[str]) -> list[str]:
            return some if named is None else [receipt for token in some for receipt in named[token]]

        def tell(some: list[str]) -> None:
            query, params = statement(outcome, some)
            if self._conn is not None:
                self._bus.fetch(query, params, self._conn)
            else:
                self.persist(lambda: self._bus.fetch(query + _sql.SOON, params))
            done = receipts_of(some)
            self._ledger.told(done)
            if outcome.verb in _COUNTERS:
                count(_COUNTERS[outcome.verb], len(done), self._label)

        def refused(token: str, exc: Exception) -> None:
            self._log_refused(outcome, exc)
            self._ledger.told(receipts_of([token]))  # its lease is not extended any more

        self._in_parts(tokens, tell, refused)

    def _in_parts(
        self,
        tokens: list[str],
        tell: Callable[[list[str]], None],
        refused: Callable[[str, Exception], None],
        patience: int = 10,
    ) -> int:
        """Do it with all; what is refused for one does not keep the others from it.

        What is locked is left for the next time. Each lock is waited for, so after `patience` of them so is
        the rest. Returns how much of the patience is left.
        """
        if patience <= 0:
            return 0
        try:
            tell(tokens)
        except (PostbusError, psycopg.Error) as exc:
            if self._conn is not None or broken(exc):
                raise
            if isinstance(exc, LockNotAvailable):
                self.locked = True
                patience -= 1
            elif len(tokens) == 1:
                refused(tokens[0], exc)
            if len(tokens) > 1:
                middle = len(tokens) // 2
                patience = self._in_parts(tokens[:middle], tell, refused, patience)
                patience = self._in_parts(tokens[middle:], tell, refused, patience)
        return patience

    def _log_refused(self, outcome: Outcome, exc: Exception) -> None:
        if not isinstance(exc, LeaseLost):
            log.error("%s: a message could not be settled and comes again: %s", self._label, brief(exc))
        elif self._unsure:
            log.info("%s: %s came too late, or twice: %s", self._label, outcome.verb, exc.message)
        else:
            log.warning("%s: %s came too late: %s", self._label, outcome.verb, exc.message)

    def keep(self, lost: Callable[[set[str]], None]) -> None:
        """Extend the leases that have less than two thirds of their time left."""
        now = time.monotonic()
        tokens, pages = self._ledger.old(now - self.lease / 3)
        if not tokens:
            return
        gone = 0
        at_work: set[str] = set()

        def extend(some: list[str]) -> None:
            self.persist(lambda: self._bus.fetch(_sql.KEEP, (some, self.lease, None)))

        def refused(token: str, exc: Exception) -> None:
            # What was not begun must not be begun.
            nonlocal gone
            count, busy = self._ledger.lose(token)
            gone += count
            at_work.update(busy)

        # A lease that is locked is just being finished: nobody else gets it meanwhile.
        if self._in_parts(tokens, extend, refused) > 0:
            for page in pages:
                page.kept_at = now
        if gone:
            log.warning("%s: the leases of %d messages were lost", self._label, gone)
        if at_work:
            lost(at_work)

    def persist(self, call: Callable[[], R]) -> R:
        """Do it, however often the connection breaks."""
        pause = 0.05
        told = False
        mark = object()
        self._asked[mark] = time.monotonic()
        try:
            while True:
                try:
                    return call()
                except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
                    if not broken(exc) or self._too_late():
                        raise
                    log.log(
                        10 if told else 30, "%s: no connection, trying again: %s", self._label, brief(exc)
                    )
                    told = self._unsure = True
                sleep(random.uniform(0.5, 1) * pause)  # noqa: S311 - not a secret
                pause = min(pause * 2, 2.0)
        finally:
            del self._asked[mark]

    def unanswered(self) -> float:
        """For how many seconds the database has owed us an answer."""
        return time.monotonic() - min(list(self._asked.values()), default=time.monotonic())


def broken(exc: Exception) -> bool:
    """Whether it is about the connection or the server, not about what was asked for."""
    return isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError) and not isinstance(
        exc, LockNotAvailable
    )


def brief(exc: Exception) -> str:
    """The first line, which says it; the others are where in the engine it happened."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]
