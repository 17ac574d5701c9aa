"""Consuming as iteration: leaving the body acks, an exception nacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from postbus.client._async._consumer import AsyncConsumer
from postbus.client._async._delivery import AsyncDelivery
from postbus.client._async._source import AsyncSource
from postbus.client._compat import log
from postbus.client._outcome import ACK, Outcome, nack, reason_of
from postbus.errors import BadArgument

T = TypeVar("T")


def outcome_of(exc: BaseException | None) -> Outcome:
    """What becomes of a message when its body is left."""
    if exc is None:
        return ACK
    # Whoever was interrupted or cancelled has not failed: others may try at once.
    return nack(None if isinstance(exc, Exception) else 0, reason_of(exc))


class _AsyncLoop(Generic[T]):
    """What the loops over messages and over batches share. One loop is for one task or thread."""

    _begun = False

    def __init__(
        self,
        source: AsyncSource[T],
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
        self._consumer: AsyncConsumer[T] | None = None
        self._in_hand: list[str] = []
        self._ended = False

    async def _begin(self) -> AsyncConsumer[T]:
        """The consumer, with all settled that the loop has gone past."""
        if self._consumer is None:
            self._consumer = AsyncConsumer(
                self._source, max=self._max, prefetch=self._prefetch, lease=self._lease
            )
        consumer = self._consumer
        if not self._begun:
            await consumer.start()
            self._begun = True
        for receipt in self._in_hand:
            consumer.settle(receipt)
        self._in_hand = []
        if consumer.conn is not None:
            await consumer.flush()
        return consumer

    async def close(self) -> None:
        """End the loop: the message in hand is acked, and those that wait in line are given back."""
        await self._end(None)

    async def _end(self, exc: BaseException | None) -> None:
        self._ended = True
        if self._consumer is None:
            return
        for receipt in self._in_hand:
            self._consumer.settle(receipt, outcome_of(exc))
        self._in_hand = []
        await self._consumer.close(patient=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._end(exc)
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


class AsyncMessages(_AsyncLoop[T]):
    """An endless loop over the messages of a queue or group.

    Asking for the next message acks the one before. A loop that is left early (break, return, an exception)
    gives the message in hand back, to come again after the backoff. In a ``with`` block the two are told
    apart: leaving it acks, an exception nacks with the exception as the reason.

    Example:
        >>> async with queue.messages(prefetch=50) as messages:  # doctest: +SKIP
        ...     async for m in messages:
        ...         await deliver(m.payload)
    """

    def __aiter__(self) -> AsyncMessages[T]:
        return self

    async def __anext__(self) -> AsyncDelivery[T]:
        if self._ended:
            raise StopAsyncIteration
        consumer = self._consumer
        found = None
        if consumer is not None and self._begun and consumer.conn is None:
            # What mostly happens, and nothing has to be waited for.
            found = consumer.take_ready(self._in_hand.pop() if self._in_hand else None)
        if found is None:
            consumer = await self._begin()
            found = await consumer.take(self._wait)
        if found is None:
            await self._end(None)
            raise StopAsyncIteration
        self._in_hand = [found.receipt]
        return found


class AsyncBatches(_AsyncLoop[T]):
    """The same with up to `max` messages in each step; going on to the next batch acks all of them.

    Example:
        >>> async for batch in queue.batches(max=500):  # doctest: +SKIP
        ...     await store([m.payload for m in batch])
    """

    def __aiter__(self) -> AsyncBatches[T]:
        return self

    async def __anext__(self) -> Sequence[AsyncDelivery[T]]:
        if self._ended:
            raise StopAsyncIteration
        consumer = await self._begin()
        first = await consumer.take(self._wait)
        if first is None:
            await self._end(None)
            raise StopAsyncIteration
        batch = [first]
        while len(batch) < self._max and (more := consumer.take_ready()) is not None:
            batch.append(more)
        self._in_hand = [m.receipt for m in batch]
        return batch


class AsyncBatch(AsyncMessages[T]):
    """The messages of one `receive` or `consume`, to loop over.

    Example:
        >>> batch = await queue.receive(max=10)  # doctest: +SKIP
        >>> len(batch)  # doctest: +SKIP
        10
        >>> async for m in batch:  # doctest: +SKIP
        ...     await deliver(m.payload)

    Attributes:
        messages: all of them, to be finished by their own verbs.
    """

    def __init__(
        self,
        source: AsyncSource[T],
        rows: list[tuple[Any, ...]],
        *,
        lease: float | None,
        taken_at: float,
        conn: object | None,
        ordering: str,
    ) -> None:
        super().__init__(source, max=1, lease=lease, wait=0)
        self._consumer = AsyncConsumer(
            source,
            max=1,
            prefetch=1,
            lease=lease,
            rows=rows,
            taken_at=taken_at,
            conn=conn,
            ordering=ordering,
        )
        self.messages: Sequence[AsyncDelivery[T]] = self._consumer.all_ready()

    async def bury(self) -> None:
        """Send to the dead letters what could not be read, whether or not anybody begins to loop."""
        assert self._consumer is not None
        await self._consumer.bury()

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, index: int) -> AsyncDelivery[T]:
        return self.messages[index]

    def __bool__(self) -> bool:
        return bool(self.messages)
