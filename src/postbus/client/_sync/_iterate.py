# Generated from ../_async/_iterate.py by tools/gen_sync.py ("make format"): edit that one.
"""Consuming as iteration: leaving the body acks, an exception nacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from postbus.client._compat import log
from postbus.client._outcome import ACK, Outcome, nack, reason_of
from postbus.client._sync._consumer import Consumer
from postbus.client._sync._delivery import Delivery
from postbus.client._sync._source import Source
from postbus.errors import BadArgument

T = TypeVar("T")


def outcome_of(exc: BaseException | None) -> Outcome:
    """What becomes of a message when its body is left."""
    if exc is None:
        return ACK
    # Whoever was interrupted or cancelled has not failed: others may try at once.
    return nack(None if isinstance(exc, Exception) else 0, reason_of(exc))


class _Loop(Generic[T]):
    """What the loops over messages and over batches share. One loop is for one task or thread."""

    _begun = False

    def __init__(
        self,
        source: Source[T],
        *,
        max: int,
        prefetch: int | None = None,
        lease: float | None = None,
        wait: float | None = None,
    ) -> None:
        for name, value, least in (("max", max, 1), ("prefetch", prefetch, 1), ("wait", wait, 0)):
            if value is not None and value < least:
                raise BadArgument(f"{name} must be at least {least}, not {value}")
        if lease is not None and lease <= 0:
            raise BadArgument(f"lease must be more than 0 seconds, not {lease}")
        self._source = source
        self._max = max
        self._prefetch = prefetch or 2 * max
        self._lease = lease
        self._wait = wait
        self._consumer: Consumer[T] | None = None
        self._in_hand: list[str] = []
        self._ended = False

    def _begin(self) -> Consumer[T]:
        """The consumer, with all settled that the loop has gone past."""
        if self._consumer is None:
            self._consumer = Consumer(self._source, max=self._max, prefetch=self._prefetch, lease=self._lease)
        consumer = self._consumer
        if not self._begun:
            consumer.start()
            self._begun = True
        for receipt in self._in_hand:
            consumer.settle(receipt)
        self._in_hand = []
        if consumer.conn is not None:
            consumer.flush()
        return consumer

    def close(self) -> None:
        """End the loop: the message in hand is acked, and those that wait in line are given back."""
        self._end(None)

    def _end(self, exc: BaseException | None) -> None:
        self._ended = True
        if self._consumer is None:
            return
        for receipt in self._in_hand:
            self._consumer.settle(receipt, outcome_of(exc))
        self._in_hand = []
        self._consumer.close(patient=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(exc)
        except Exception as failure:
            # In a transaction of the caller's that has failed nothing can be told, and nothing needs to be.
            if exc is None:
                raise
            log.debug("%s: %s", self._source.label, failure)

    def __del__(self) -> None:
        # A loop that was left by break, return or an exception: which one it was cannot be known here, so
        # what was in hand comes again.
        if self._begun and not self._ended and self._consumer is not None:
            with suppress(RuntimeError):  # the event loop has been closed
                self._consumer.leave(self._in_hand, nack(reason="the loop was left"))


class Messages(_Loop[T]):
    """An endless loop over the messages of a queue or group.

    Asking for the next message acks the one before. A loop that is left early (break, return, an exception)
    gives the message in hand back, to come again after the backoff. In a ``with`` block the two are told
    apart: leaving it acks, an exception nacks with the exception as the reason.

    Example:
        >>> with queue.messages(prefetch=50) as messages:  # doctest: +SKIP
        ...     for m in messages:
        ...         deliver(m.payload)
    """

    def __iter__(self) -> Messages[T]:
        return self

    def __next__(self) -> Delivery[T]:
        if self._ended:
            raise StopIteration
        consumer = self._consumer
        found = None
        if consumer is not None and self._begun and consumer.conn is None:
            # What mostly happens, and nothing has to be waited for.
            found = consumer.take_ready(self._in_hand.pop() if self._in_hand else None)
        if found is None:
            consumer = self._begin()
            found = consumer.take(self._wait)
        if found is None:
            self._end(None)
            raise StopIteration
        self._in_hand = [found.receipt]
        return found


class Batches(_Loop[T]):
    """The same with up to `max` messages in each step; going on to the next batch acks all of them.

    Example:
        >>> for batch in queue.batches(max=500):  # doctest: +SKIP
        ...     store([m.payload for m in batch])
    """

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> Sequence[Delivery[T]]:
        if self._ended:
            raise StopIteration
        consumer = self._begin()
        first = consumer.take(self._wait)
        if first is None:
            self._end(None)
            raise StopIteration
        batch = [first]
        while len(batch) < self._max and (more := consumer.take_ready()) is not None:
            batch.append(more)
        self._in_hand = [m.receipt for m in batch]
        return batch


class Batch(Messages[T]):
    """The messages of one `receive` or `consume`, to loop over.

    Example:
        >>> batch = queue.receive(max=10)  # doctest: +SKIP
        >>> len(batch)  # doctest: +SKIP
        10
        >>> for m in batch:  # doctest: +SKIP
        ...     deliver(m.payload)

    Attributes:
        messages: all of them, to be finished by their own verbs.
    """

    def __init__(
        self,
        source: Source[T],
        rows: list[tuple[Any, ...]],
        *,
        lease: float | None,
        taken_at: float,
        conn: object | None,
        ordering: str,
    ) -> None:
        super().__init__(source, max=1, lease=lease, wait=0)
        self._consumer = Consumer(
            source,
            max=1,
            prefetch=1,
            lease=lease,
            rows=rows,
            taken_at=taken_at,
            conn=conn,
            ordering=ordering,
        )
        self.messages: Sequence[Delivery[T]] = self._consumer.all_ready()

    def bury(self) -> None:
        """Send to the dead letters what could not be read, whether or not anybody begins to loop."""
        assert self._consumer is not None
        self._consumer.bury()

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, index: int) -> Delivery[T]:
        return self.messages[index]

    def __bool__(self) -> bool:
        return bool(self.messages)
