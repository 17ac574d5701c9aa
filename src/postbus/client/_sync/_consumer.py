# Generated from ../_async/_consumer.py by tools/gen_sync.py ("make format"): edit that one.
"""Taking messages ahead, and looking after them until they are settled.

Two loops run in the background. One fetches while there is room: everything that is on a lease of ours
counts, also what is done but not yet settled. The other one settles, see `_settler`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from postbus import _telemetry
from postbus.client import _pace
from postbus.client._compat import Event, alive, cancel, join, log, spawn
from postbus.client._ledger import Ledger
from postbus.client._outcome import ACK, RELEASE, Outcome, dead_letter
from postbus.client._sync._delivery import Delivery
from postbus.client._sync._settler import Settler
from postbus.client._sync._source import Source
from postbus.errors import Undecodable

T = TypeVar("T")

RESTLESS = 60.0  # for how long after a nack it is looked for more often, where its due time is not known


class Consumer(Generic[T]):
    """Messages of one source, on leases that this object looks after.

    Args:
        source: the queue or group.
        max: how many to take in one call.
        prefetch: how many may be on leases of ours at a time.
        lease: seconds; default: that of the queue or group.
        rows: hand out these, and take no others.
        taken_at: when `rows` were asked for.
        conn: the connection of the transaction in which `rows` were taken: they are settled there.
        ordering: of the source, if it is known.
    """

    def __init__(
        self,
        source: Source[T],
        *,
        max: int,
        prefetch: int,
        lease: float | None = None,
        rows: list[tuple[Any, ...]] | None = None,
        taken_at: float = 0.0,
        conn: object | None = None,
        ordering: str | None = None,
    ) -> None:
        self.source = source
        self.conn = conn
        self.failure: BaseException | None = None
        self.fetched_at: float | None = None  # when the database last answered
        self._bus = source.bus
        self._max = max
        self._prefetch = prefetch
        self._least = 1 if prefetch < 2 else min(max, prefetch // 2)
        self._lease = lease if conn is None else None
        self._arrived = Event()  # something is ready, or there is something to know
        self._nudge = Event()  # for the fetching loop: room, or news
        self._ledger: Ledger[Delivery[T]] = Ledger(self._nudge.set)
        self._ledger.ordering = ordering
        self._settler = Settler(source.bus, source.label, self._ledger, conn)
        self._takers = 0
        self._looks = 0  # how often the database was asked
        self._dry = 0  # the last look that found nothing, when nothing was on a lease of ours
        self._restless_until = 0.0
        self._closing = False
        self._ending = False  # nobody waits any more for what is in hand
        self._settled = False  # the settling loop has ended
        self._left: deque[tuple[list[str], Outcome]] = deque()
        self._tasks: list[Any] = []
        self._unsubscribe: Callable[[], None] | None = None
        self._rows = rows
        if rows is not None:
            self._arrive(rows, taken_at)

    def start(self) -> None:
        """Begin to work in the background; again is fine."""
        if self._tasks or self._closing or self.conn is not None:
            return
        self._bus.adopt(self)
        try:
            self._start()
        except BaseException:
            self._bus.disown(self)
            raise

    def _start(self) -> None:
        persist = self._settler.persist
        if self._lease is None:
            self._lease = persist(self.source.default_lease)
        self._settler.lease = self._lease
        if self._ledger.ordering is None:
            self._ledger.ordering = persist(self.source.ordering)
        listener = self._bus.listener
        name = self.source.label
        self._tasks.append(spawn(self._settle_loop, f"postbus-settle-{name}"))
        if self._rows is None:
            self._unsubscribe = listener.subscribe(self.source.channel, self._nudge.set_from_thread)
            self._tasks.append(spawn(self._fetch_loop, f"postbus-fetch-{name}"))

    def close(self, *, patient: bool = True) -> None:
        """Give back what was not begun, settle the rest, and end. What is in hand stays on its lease.

        A message that a transaction has locked is waited for only if `patient`: the transaction may be the
        caller's own. It is then settled in the background.
        """
        self.abandon()
        self.hurry()
        if not self._tasks:
            self.flush()
            self._bus.disown(self)
            return
        end = time.monotonic() + _pace.CLOSE + 1
        while not join(self._tasks, _pace.CLOSE_LOOK):
            if self._settler.locked and not patient:
                return
            if time.monotonic() > end:
                log.warning("%s: the database does not answer: messages come again", self.source.label)
                cancel(self._tasks)
                break

    def hurry(self) -> None:
        """End as soon as everything is told, and after some seconds in any case."""
        self._ending = True
        if self._settler.give_up_at is None:
            self._settler.give_up_at = time.monotonic() + _pace.CLOSE
        self._settler.some.set()

    def abandon(self, receipts: list[str] | None = None, outcome: Outcome = RELEASE) -> None:
        """Begin nothing more, and give back what was not begun; `receipts` get an outcome too.

        What is in hand can still be settled, until `close`. Without a close the loops end when everything is.
        """
        self.leave(receipts or [], outcome)
        self._tidy()

    def leave(self, receipts: list[str], outcome: Outcome) -> None:
        """The same, carried out in the background. It can be called from ``__del__``, in any thread."""
        self._left.append((receipts, outcome))
        self._closing = self._settler.closing = True
        for event in (self._nudge, self._settler.some, self._settler.enough, self._arrived):
            event.set_from_thread()

    def _tidy(self) -> None:
        """Do what `leave` asks for."""
        if not self._closing:
            return
        if self._unsubscribe is not None:
            self._unsubscribe()
        while True:
            try:
                receipts, outcome = self._left.popleft()
            except IndexError:
                break
            for receipt in receipts:
                self._ledger.settle(receipt, outcome)
        self._ledger.give_back()

    @property
    def closing(self) -> bool:
        """Whether nothing more is begun."""
        return self._closing

    @property
    def on_lease(self) -> int:
        """How many messages are ours at the moment."""
        return self._ledger.on_lease

    @property
    def ready(self) -> int:
        """How many could be handed out at once, at the most."""
        return self._ledger.ready

    def all_ready(self) -> list[Delivery[T]]:
        """All that could be handed out, without handing it out."""
        return self._ledger.all_ready()

    def take_ready(self, done: str | None = None) -> Delivery[T] | None:
        """The next message, if one is there already; `done` is the receipt of the one before, to be acked."""
        if self._closing:
            if done is not None:
                self.settle(done)
            return None
        # One that has waited for its whole lease, because this process was stopped or the database was away,
        # may be somebody else's by now.
        oldest = 0.0 if self._lease is None else time.monotonic() - self._lease
        found = self._ledger.pop(oldest, done)
        if done is not None:
            self._settler.some.set()
            if self._ledger.urgent:
                self._settler.enough.set()
        return found

    def take(self, wait: float | None = None) -> Delivery[T] | None:
        """The next message; None when the source stayed empty for `wait` seconds, or after close."""
        found = self.take_ready()
        if found is not None:
            return found
        self._settler.some.set()
        self._settler.enough.set()  # whoever waits has nothing more to add
        self._takers += 1
        self._nudge.set()
        try:
            return self._wait_for_one(wait)
        finally:
            self._takers -= 1

    def _wait_for_one(self, wait: float | None) -> Delivery[T] | None:
        end = None if wait is None else time.monotonic() + wait
        last: int | None = None  # the look after which there will be no other
        while True:
            self._arrived.clear()
            found = self.take_ready()
            if found is not None:
                return found
            if self._closing:
                return None
            if self._ledger.ready == 0:
                if self.failure is not None:
                    raise self.failure
                if self._rows is not None:
                    return None
                if last is not None and self._dry > last:
                    return None
            left = _pace.IDLE if end is None else end - time.monotonic()
            if left <= 0 and last is None:
                last = self._looks
                self._nudge.set()
            self._arrived.wait_for(left if left > 0 else _pace.IDLE)

    def settle(self, receipt: str, outcome: Outcome = ACK) -> bool:
        """Note what became of a message; False if it is no longer ours to say."""
        if self._settled or not self._ledger.settle(receipt, outcome):
            return False
        if outcome.verb == "nack":
            self._restless_until = time.monotonic() + RESTLESS
        self._settler.some.set()
        if self._ledger.urgent:
            self._settler.enough.set()
        return True

    def flush(self) -> None:
        """Settle now; for consumers that do nothing in the background."""
        if self._ledger.pending:
            self._settler.flush()

    def bury(self) -> None:
        """Send to the dead letters what could not be decoded, now and only once."""
        for outcome, receipts in self._ledger.failures().items():
            self._bus.dead_letter(receipts, reason=outcome.reason, conn=self.conn)
            self._ledger.told(receipts)

    def forget(self, receipt: str) -> None:
        """A message was finished by other means, or is lost."""
        self._ledger.forget(receipt)
        self._settler.some.set()

    def holds(self, receipt: str) -> bool:
        """Whether a message is ours and has no outcome yet."""
        return self._ledger.holds(receipt)

    def unanswered(self) -> float:
        """For how many seconds the database has owed us an answer; 0.0 if it does not."""
        return self._settler.unanswered()

    def finishing(self, receipt: str, *, goes_back: bool = False) -> list[str]:
        """A message is about to be finished by other means: it is neither extended nor called lost.

        If it goes back: returns those that have to be released before it, to keep the order. They are not
        ours any more.
        """
        if goes_back:
            self._restless_until = time.monotonic() + RESTLESS
        return self._ledger.ending(receipt, goes_back=goes_back)

    def not_finished(self, receipt: str) -> None:
        """After `finishing`: it went wrong, the message is ours as before."""
        self._ledger.not_ending(receipt)

    def lose(self, token: str) -> None:
        """Somebody has found out that a lease is gone: what is on it must not be begun."""
        _, at_work = self._ledger.lose(token)
        if at_work:
            self.on_lost(at_work)

    def on_lost(self, receipts: set[str]) -> None:
        """Called with what was lost while somebody worked on it."""

    def _fetch_loop(self) -> None:
        empty = 0
        try:
            while not self._closing:
                self._nudge.clear()
                room = self._prefetch - self._ledger.on_lease
                if room < (1 if self._takers and not self._ledger.ready else self._least):
                    self._nudge.wait_for(_pace.IDLE)
                    continue
                # News that come from here on are not missed: they are about what this look may not see.
                self._looks += 1
                quiet = self._ledger.on_lease == 0
                if self._fetch(min(room, self._max)):
                    empty = 0
                    continue
                empty += 1
                if quiet:
                    self._dry = self._looks
                    self._arrived.set()
                if self._nudge.wait_for(self._pause(empty)):
                    empty = 0
        except BaseException as exc:
            self.failure = exc
            self._arrived.set()
            if not isinstance(exc, Exception):
                raise

    def _fetch(self, room: int) -> bool:
        asked_at = 0.0

        def ask() -> list[tuple[Any, ...]]:
            nonlocal asked_at
            asked_at = time.monotonic()
            return self.source.take(room, self._lease)

        rows = self._settler.persist(ask)
        self.fetched_at = time.monotonic()
        self._arrive(rows, asked_at)
        return bool(rows)

    def _pause(self, empty: int) -> float:
        """How long to wait after looks that found nothing."""
        due = self._settler.persist(self.source.next_due)
        # Nobody says when what was given back to a stream is due.
        told = self._bus.listener.works and (due is not None or time.monotonic() > self._restless_until)
        return _pace.pause(told, empty, due)

    def _arrive(self, rows: list[tuple[Any, ...]], taken_at: float) -> None:
        if not rows:
            return
        _telemetry.batch(len(rows), self.source.channel)
        good: list[Delivery[T]] = []
        refused: list[tuple[str, Outcome]] = []
        for row in rows:
            try:
                good.append(self.source.deliver(row, self))
            except Undecodable as exc:
                outcome = dead_letter(str(exc))
                reason = outcome.reason  # which can be written anywhere
                log.warning("%s: message %s goes to the dead letters: %s", self.source.label, row[0], reason)
                refused.append((row[8], outcome))
        self._ledger.add([(row[8], row[2], row[9]) for row in rows], good, refused, taken_at)
        if refused:
            self._settler.some.set()
        self._arrived.set()
        self._tidy()

    def _settle_loop(self) -> None:
        def ends() -> bool:
            if self._ledger.ready:
                self._arrived.set()  # it may have waited for its lease to be extended
            if not self._closing:
                return False
            fetching = any(alive(task) for task in self._tasks[1:])
            self._tidy()
            self._settled = not fetching and not self._ledger.pending and (self._ending or not self.on_lease)
            return self._settled

        def lost(receipts: set[str]) -> None:
            self.on_lost(receipts)

        try:
            self._settler.run(ends, lost)
        finally:
            self._settled = True
            self._bus.disown(self)
