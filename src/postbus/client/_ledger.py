"""What a consumer holds: which messages are on leases, which are ready, and what became of the others.

Bookkeeping only, no database. The loops of a consumer and whoever takes messages from it share one, in the
blocking client from several threads; every method is a short section of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from postbus.client._outcome import ACK, RELEASE, Outcome

ENOUGH = 200  # outcomes that are worth a call at once


class HasReceipt(Protocol):
    """A message that was handed out."""

    @property
    def receipt(self) -> str:
        """What finishes it."""
        ...


D = TypeVar("D", bound=HasReceipt)


class Page:
    """Messages that came in one call, and share the time of their lease.

    Attributes:
        token: finishes all of them at once (streams), or None.
        receipts: of all that came, in the order of the stream.
        keys: of the same.
        waiting: receipts without an outcome yet.
        acked: receipts that are done, but not yet in the database.
        failed: receipts with another outcome that is not yet in the database.
        ending: receipts that are just being finished by other means.
        whole: all that was ever taken from it was told to the database by us. Otherwise the token must not be
            used: it would finish a message whose own transaction may still roll back.
        acked_at: when the first of `acked` was.
        kept_at: when the lease was last known to be whole.
    """

    __slots__ = (
        "acked", "acked_at", "ending", "failed", "kept_at", "keys", "receipts", "token", "waiting", "whole"
    )  # fmt: skip

    def __init__(
        self, token: str | None, receipts: list[str], keys: list[str | None], kept_at: float
    ) -> None:
        self.token = token
        self.receipts = receipts
        self.keys = keys
        self.waiting = set(receipts)
        self.acked: set[str] = set()
        self.failed: dict[str, Outcome] = {}
        self.ending: set[str] = set()
        self.whole = True
        self.acked_at = 0.0
        self.kept_at = kept_at


class Ledger(Generic[D]):
    """The messages that are on leases of ours.

    Args:
        room: called when there is room for more.

    Attributes:
        ordering: of the group: ``key``, ``stream`` or, also for queues, ``none``. None: not known yet.
        pending: how many outcomes the database does not know yet.
        urgent: outcomes should not wait for more of them.
    """

    def __init__(self, room: Callable[[], None]) -> None:
        self.ordering: str | None = None
        self.pending = 0
        self.urgent = False
        self._room = room
        self._lock = threading.RLock()
        self._ready: deque[D] = deque()
        self._open: dict[str, Page] = {}
        self._pages: dict[int, Page] = {}

    @property
    def on_lease(self) -> int:
        """How many messages are ours."""
        return len(self._open)

    @property
    def ready(self) -> int:
        """How many of them wait in line, at the most."""
        return len(self._ready)

    def all_ready(self) -> list[D]:
        """Those that wait in line."""
        with self._lock:
            return list(self._ready)

    def add(
        self,
        rows: list[tuple[str, str | None, str | None]],
        ready: Iterable[D],
        refused: Iterable[tuple[str, Outcome]],
        taken_at: float,
    ) -> None:
        """Messages have come: (receipt, key, token) of each, those to hand out, and the others."""
        by_token: dict[str | None, list[tuple[str, str | None, str | None]]] = {}
        if len({row[2] for row in rows}) == 1:
            by_token[rows[0][2]] = rows
        else:
            for row in rows:
                by_token.setdefault(row[2], []).append(row)
        with self._lock:
            for token, some in by_token.items():
                page = Page(token, [row[0] for row in some], [row[1] for row in some], taken_at)
                for receipt in self._open.keys() & page.waiting:
                    self.forget(receipt)  # the server crashed, and has forgotten that we have it
                self._pages[id(page)] = page
                self._open.update(dict.fromkeys(page.receipts, page))
            self._ready.extend(ready)
            for receipt, outcome in refused:
                self.settle(receipt, outcome)

    def pop(self, oldest: float, done: str | None = None) -> D | None:
        """The next message to begin; None also when its lease is older than `oldest` and may have ended.

        If the one before is `done` it is acked first: the two in one are what loops do most of the time.
        """
        with self._lock:
            if done is not None:
                self._ack(done)
            while self._ready:
                receipt = self._ready[0].receipt
                page = self._open.get(receipt)
                if page is None or receipt not in page.waiting:
                    self._ready.popleft()  # lost, or finished by its own verbs
                elif page.kept_at < oldest:
                    return None
                else:
                    return self._ready.popleft()
            return None

    def _ack(self, receipt: str) -> bool:
        page = self._open.get(receipt)
        if page is None or receipt not in page.waiting:
            return False
        page.waiting.remove(receipt)
        if not page.acked:
            page.acked_at = time.monotonic()
        page.acked.add(receipt)
        self.pending += 1
        if self.pending >= ENOUGH or (page.token is not None and not page.waiting):
            self.urgent = True
        return True

    def holds(self, receipt: str) -> bool:
        """Whether a message is ours and has no outcome yet."""
        with self._lock:
            page = self._open.get(receipt)
            return page is not None and receipt in page.waiting

    def settle(self, receipt: str, outcome: Outcome) -> bool:
        """Note what became of a message; False if it is no longer ours to say.

        Where there is an order, what comes after a message that goes back goes back before it.
        """
        with self._lock:
            if outcome is ACK:
                return self._ack(receipt)
            page = self._open.get(receipt)
            if page is None or receipt not in page.waiting:
                return False
            page.waiting.remove(receipt)
            page.failed[receipt] = outcome
            self.pending += 1
            if outcome.verb != "dead_letter":
                for later in self._behind(page, receipt):
                    self.settle(later, RELEASE)
            self.urgent = True
            return True

    def _behind(self, page: Page, receipt: str) -> list[str]:
        if page.token is None or self.ordering in (None, "none"):
            return []
        at = page.receipts.index(receipt)
        key = page.keys[at]
        if self.ordering == "key" and key is None:
            return []
        return [
            later
            for later, its in zip(page.receipts[at + 1 :], page.keys[at + 1 :], strict=True)
            if later in page.waiting and (self.ordering == "stream" or its == key)
        ]

    def ending(self, receipt: str, *, goes_back: bool) -> list[str]:
        """A message is about to be finished by other means; returns those that have to go back before it.

        Those are no longer ours.
        """
        with self._lock:
            page = self._open.get(receipt)
            if page is None:
                return []
            page.ending.add(receipt)
            later = self._behind(page, receipt) if goes_back else []
            for each in later:
                self.forget(each)
            return later

    def not_ending(self, receipt: str) -> None:
        """It could not be finished by other means: it is ours as before."""
        with self._lock:
            page = self._open.get(receipt)
            if page is not None:
                page.ending.discard(receipt)

    def forget(self, receipt: str) -> None:
        """A message was finished by other means, or is lost."""
        with self._lock:
            page = self._open.get(receipt)
            if page is not None:
                page.whole = False
                self.told([receipt])

    def told(self, receipts: Iterable[str]) -> None:
        """The database knows what became of them."""
        touched: dict[int, Page] = {}
        last: Page | None = None
        with self._lock:
            for receipt in receipts:
                page = self._open.pop(receipt, None)
                if page is None:
                    continue
                if receipt in page.acked:
                    page.acked.remove(receipt)
                    self.pending -= 1
                elif page.failed.pop(receipt, None) is not None:
                    self.pending -= 1
                else:
                    page.waiting.discard(receipt)
                page.ending.discard(receipt)
                if page is not last:
                    touched[id(page)] = last = page
            for number, page in touched.items():
                if not (page.waiting or page.acked or page.failed):
                    self._pages.pop(number, None)
        self._room()

    def give_back(self) -> None:
        """Release all that wait in line."""
        with self._lock:
            while self._ready:
                self.settle(self._ready.popleft().receipt, RELEASE)

    def failures(self) -> dict[Outcome, list[str]]:
        """Outcomes to tell before the acks: first what goes back behind others."""
        found: dict[Outcome, list[str]] = {RELEASE: []}
        with self._lock:
            self.urgent = False
            for page in self._pages.values():
                for receipt, outcome in page.failed.items():
                    found.setdefault(outcome, []).append(receipt)
        return {outcome: receipts for outcome, receipts in found.items() if receipts}

    def acks(self, before: float) -> tuple[list[str], dict[str, list[str]]]:
        """Acks to tell: receipts, and tokens of whole pages with their receipts.

        Of a page of a stream of which only a part is done, those since `before`.
        """
        receipts: list[str] = []
        pages: dict[str, list[str]] = {}
        with self._lock:
            for page in self._pages.values():
                if not page.acked:
                    continue
                if page.token is None:
                    receipts += page.acked
                elif page.whole and not page.waiting and not page.failed:
                    pages[page.token] = list(page.acked)
                elif page.acked_at < before or not page.waiting:
                    receipts += page.acked
        return receipts, pages

    def partly_acked(self) -> bool:
        """Whether there are acks that wait for the rest of their page."""
        with self._lock:
            return any(page.acked for page in self._pages.values())

    def old(self, before: float) -> tuple[list[str], list[Page]]:
        """What to extend: tokens and receipts on leases older than that, and their pages."""
        found: list[str] = []
        pages: list[Page] = []
        with self._lock:
            for page in self._pages.values():
                held = [*page.waiting, *page.acked, *page.failed]
                held = [r for r in held if r not in page.ending]
                if page.kept_at < before and held:
                    pages.append(page)
                    found += held if page.token is None else [page.token]
        return found, pages

    def lose(self, token: str) -> tuple[int, set[str]]:
        """A lease is gone. Returns how many messages were on it, and which of them somebody is at work on."""
        with self._lock:
            gone = {r for r, page in self._open.items() if token in (r, page.token) and r not in page.ending}
            in_line = {d.receipt for d in self._ready}
            at_work = {r for r in gone if r in self._open[r].waiting and r not in in_line}
            for receipt in gone:
                self.forget(receipt)
        return len(gone), at_work
