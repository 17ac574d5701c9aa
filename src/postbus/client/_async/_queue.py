"""A queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar

from postbus._telemetry import Sending
from postbus.client import _sql
from postbus.client._async._bus import AsyncBus
from postbus.client._async._delivery import AsyncDelivery
from postbus.client._async._iterate import AsyncBatch, AsyncBatches, AsyncMessages
from postbus.client._encode import batch_of, headers_of, moment
from postbus.client._message import DeadLetter, Letters, Message, dead_letter_of, letters_of
from postbus.serializers import Codec

T = TypeVar("T")


class AsyncQueue(Generic[T]):
    """A work queue: every message goes to one consumer, until it is acked.

    Example:
        >>> emails = await bus.queue("emails", create=True)  # doctest: +SKIP
        >>> await emails.send({"to": "someone@example.com"}, delay=60)  # doctest: +SKIP
        >>> async for m in emails:  # doctest: +SKIP
        ...     await deliver(m.payload)
    """

    def __init__(self, bus: AsyncBus, name: str, codec: Codec) -> None:
        self.bus = bus
        self.name = name
        self._codec = codec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    async def send(
        self,
        payload: T,
        *,
        type: str = "default",
        key: str | None = None,
        headers: dict[str, Any] | None = None,
        priority: int = 0,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        dedupe_key: str | None = None,
        conn: object | None = None,
    ) -> int:
        """Send one message; returns its id.

        Args:
            payload: what to send.
            type: a word for what it is; consumers may ask for one type.
            key: messages of one key belong together; see key policies.
            headers: what travels beside the payload.
            priority: 0 to 9; higher ones first.
            delay: seconds until it is due.
            deliver_at: or when it is due, with a time zone.
            ttl: seconds after which it is not delivered any more.
            dedupe_key: a second message with the same one is not sent; the id of the first is returned.
            conn: a connection of yours: the message is sent if and when its transaction commits.

        Raises:
            QueueFull: the queue or the key has reached its maximum size.
        """
        with Sending("send", self.name, headers) as carried:
            data, sent = self._codec.encode(payload, carried)
            plain = (self.name, data, type, key, headers_of(sent, self.name))
            if priority == 0 and delay is None and deliver_at is None and ttl is None and dedupe_key is None:
                query, params = _sql.SEND_PLAIN.format(kind=_sql.kind(data)), plain
            else:
                query = _sql.SEND.format(kind=_sql.kind(data))
                at = moment("deliver_at", deliver_at)
                params = (*plain, priority, delay, at, ttl, dedupe_key)  # type: ignore[assignment]
            return int((await self.bus.fetch(query, params, conn))[0][0])

    async def send_batch(
        self,
        payloads: Sequence[T],
        *,
        type: str | Sequence[str] = "default",
        key: str | Sequence[str | None] | None = None,
        headers: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        priority: int = 0,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        ttl: float | None = None,
        conn: object | None = None,
    ) -> list[int]:
        """Send many messages in one statement; returns their ids, in order.

        `type`, `key` and `headers` are one for all, or one for each.
        """
        if not payloads:
            return []
        with Sending("send", self.name, headers, len(payloads)) as carried:
            kind, *columns = batch_of(self._codec, self.name, payloads, type=type, key=key, headers=carried)
            params = (self.name, *columns, priority, delay, moment("deliver_at", deliver_at), ttl)
            found: list[int] = (await self.bus.fetch(_sql.SEND_BATCH.format(kind=kind), params, conn))[0][0]
            return found

    async def receive(
        self,
        max: int = 1,
        *,
        lease: float | None = None,
        type: str | None = None,
        wait: float = 0,
        conn: object | None = None,
    ) -> AsyncBatch[T]:
        """Take up to `max` messages, to loop over: leaving the body acks, an exception nacks.

        Args:
            max: the most to take.
            lease: seconds until others may have them; default: that of the queue. The loop extends it.
            type: only messages of this type.
            wait: seconds to wait for a first message.
            conn: a connection of yours. They are then taken in your transaction, and finished in it: if it
                rolls back, they never were taken.
        """
        params = (self.name, max, lease, self.bus.name, type)
        taken_at = time.monotonic()

        async def take() -> list[tuple[Any, ...]]:
            nonlocal taken_at
            taken_at = time.monotonic()
            return await self.bus.fetch(_sql.RECEIVE if conn is None else _sql.RECEIVE_IN, params, conn)

        rows = await self.bus.wait_for(self.name, wait, take, self.next_due)
        batch = AsyncBatch(self, rows, lease=lease, taken_at=taken_at, conn=conn, ordering="none")
        await batch.bury()
        return batch

    def messages(
        self,
        *,
        max: int = 100,
        prefetch: int | None = None,
        lease: float | None = None,
        wait: float | None = None,
    ) -> AsyncMessages[T]:
        """Loop over messages as they come.

        Args:
            max: how many to take in one call.
            prefetch: how many may be on leases of ours at a time; default: twice `max`.
            lease: seconds; default: that of the queue. Leases are extended in the background.
            wait: end the loop when the queue stayed empty for so many seconds; default: never.
        """
        return AsyncMessages(self, max=max, prefetch=prefetch, lease=lease, wait=wait)

    def batches(
        self,
        *,
        max: int = 100,
        prefetch: int | None = None,
        lease: float | None = None,
        wait: float | None = None,
    ) -> AsyncBatches[T]:
        """Loop over batches of up to `max` messages as they come; otherwise as `messages`."""
        return AsyncBatches(self, max=max, prefetch=prefetch, lease=lease, wait=wait)

    def __aiter__(self) -> AsyncMessages[T]:
        return self.messages()

    async def pop(
        self, max: int = 1, *, type: str | None = None, conn: object | None = None
    ) -> list[Message[T]]:
        """Take messages and finish them at once: at most once, if we die they are gone.

        What cannot be decoded goes to the dead letters.
        """
        batch = await self.receive(max, type=type, conn=conn)
        await self.bus.ack(batch.messages, conn=conn)
        return [m.plain() for m in batch.messages]

    async def peek(
        self, max: int = 10, *, state: str | None = None, id: int | None = None, key: str | None = None
    ) -> list[Message[Any]]:
        """Look at messages without taking them.

        Payloads that cannot be decoded are as they are in the database. `attempt` is how often each has been
        delivered.

        Args:
            max: the most to look at.
            state: only those that are ``ready``, ``delayed`` or ``in_flight``.
            id: only this one.
            key: only those of this key.
        """
        rows = await self.bus.fetch(_sql.PEEK, (self.name, state, max, id, key))
        return [self._found(row) for row in rows]

    def _found(self, row: tuple[Any, ...]) -> Message[Any]:
        number, kind, key, text, blob, headers, created_at, attempt, priority, state = row
        return Message(
            source=self.name,
            id=number,
            payload=self.codec_of(kind).look(text, blob, headers),
            type=kind,
            key=key,
            headers=headers or {},
            created_at=created_at,
            attempt=attempt,
            priority=priority,
            state=state,
        )

    async def dead_letters(self, max: int = 100, *, after: int = 0) -> list[DeadLetter[Any]]:
        """The messages that were given up, the oldest first, with the reason.

        Args:
            max: the most to return.
            after: only those with a larger `letter`: the next page.
        """
        rows = await self.bus.fetch(_sql.DEAD_LETTERS, (self.name, None, max, after))
        return [dead_letter_of(self.name, None, self.codec_of(row[3]), row) for row in rows]

    async def cancel(self, id: int, *, conn: object | None = None) -> bool:
        """Take a message back that nobody has in hand; False if it is too late."""
        rows = await self.bus.fetch("select postbus.cancel(%s::text, %s::bigint)", (self.name, id), conn)
        return bool(rows[0][0])

    async def purge(self) -> int:
        """Remove all messages, also those in hand, whose receipts end; returns how many."""
        return int((await self.bus.fetch("select postbus.purge_queue(%s::text)", (self.name,)))[0][0])

    async def redrive(self, ids: Letters = None) -> int:
        """Send dead letters again: these (or their `letter`), or all; returns how many."""
        params = (self.name, letters_of(ids), None)
        return int((await self.bus.fetch(_sql.REDRIVE, params))[0][0])

    async def set_key_policy(
        self,
        key: str | None = None,
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        burst: int | None = None,
        max_size: int | None = None,
        weight: int = 1,
    ) -> None:
        """Limit one key, or all that have no policy of their own: how many at once, a second, and waiting."""
        query = (
            "select postbus.set_key_policy(%s::text, %s::text, %s::int, %s::float8, %s::int, %s::int, "
            "%s::int)"
        )
        await self.bus.fetch(query, (self.name, key, concurrency, rate, burst, max_size, weight))

    async def take(self, max: int, lease: float | None) -> list[tuple[Any, ...]]:
        """For consumers: rows on a lease."""
        return await self.bus.fetch(_sql.RECEIVE, (self.name, max, lease, self.bus.name, None))

    def codec_of(self, type: str) -> Codec:
        """For consumers: what decodes messages of a type."""
        return self._codec

    def deliver(self, row: tuple[Any, ...], consumer: Any) -> AsyncDelivery[T]:
        """For consumers: a row as a message."""
        number, kind, key, text, blob, headers, created_at, attempt, receipt, batch, priority, state = row
        return AsyncDelivery(
            source=self.name,
            id=number,
            payload=self.codec_of(kind).decode(text, blob, headers),
            type=kind,
            key=key,
            headers=headers or {},
            created_at=created_at,
            attempt=attempt,
            priority=priority,
            state=state,
            receipt=receipt,
            batch=batch,
            _bus=self.bus,
            _consumer=consumer,
        )

    @property
    def channel(self) -> str:
        """For consumers: what to listen to."""
        return self.name

    @property
    def label(self) -> str:
        """For consumers: what it is called in the log."""
        return self.name

    async def ordering(self) -> str:
        """For consumers: a queue has none."""
        return "none"

    async def default_lease(self) -> float:
        """The lease of the queue, in seconds."""
        return float((await self.bus.fetch(_sql.DEFAULT_LEASE, (self.name, None)))[0][0])

    async def next_due(self) -> float | None:
        """In how many seconds the next message is due, as far as is known."""
        found: float | None = (await self.bus.fetch(_sql.NEXT_DUE, (self.name,)))[0][0]
        return found
