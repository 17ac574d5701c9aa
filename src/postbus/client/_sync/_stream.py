# Generated from ../_async/_stream.py by tools/gen_sync.py ("make format"): edit that one.
"""A stream, and the groups that read it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar

from postbus._telemetry import Sending
from postbus.client import _sql
from postbus.client._encode import batch_of, headers_of, moment
from postbus.client._message import DeadLetter, Letters, dead_letter_of, letters_of
from postbus.client._sync._bus import Bus
from postbus.client._sync._delivery import Delivery
from postbus.client._sync._iterate import Batch, Batches, Messages
from postbus.errors import BadArgument, NotFound
from postbus.serializers import Codec

T = TypeVar("T")


class Stream(Generic[T]):
    """A log of events: every group reads all of them, from its own position.

    Example:
        >>> orders = bus.stream("orders", create=True, lanes=8)  # doctest: +SKIP
        >>> orders.publish({"id": 1}, type="order.created", key="customer-1")  # doctest: +SKIP
        >>> billing = orders.group("billing", ordering="key", start="earliest")  # doctest: +SKIP
        >>> for m in billing:  # doctest: +SKIP
        ...     bill(m.payload)
    """

    def __init__(self, bus: Bus, name: str, codec: Codec) -> None:
        self.bus = bus
        self.name = name
        self._codec = codec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def publish(
        self,
        payload: T,
        *,
        type: str = "default",
        key: str | None = None,
        headers: dict[str, Any] | None = None,
        deliver_at: datetime | None = None,
        dedupe_key: str | None = None,
        conn: object | None = None,
    ) -> int:
        """Publish one event; returns its id.

        Args:
            payload: what to publish.
            type: a word for what it is.
            key: events of one key stay in order, for groups with ordering ``key``.
            headers: what travels beside the payload.
            deliver_at: when it enters the stream, with a time zone; default: now. It gets its final id
                then: the one that is returned is not that.
            dedupe_key: a second event with the same one is not published; the id of the first is returned.
            conn: a connection of yours: the event is published if and when its transaction commits.
        """
        with Sending("publish", self.name, headers) as carried:
            data, sent = self._codec.encode(payload, carried)
            plain = (self.name, data, type, key, headers_of(sent, self.name))
            if deliver_at is None and dedupe_key is None:
                query, params = _sql.PUBLISH_PLAIN.format(kind=_sql.kind(data)), plain
            else:
                query = _sql.PUBLISH.format(kind=_sql.kind(data))
                at = moment("deliver_at", deliver_at)
                params = (*plain, at, dedupe_key)  # type: ignore[assignment]
            return int((self.bus.fetch(query, params, conn))[0][0])

    def publish_batch(
        self,
        payloads: Sequence[T],
        *,
        type: str | Sequence[str] = "default",
        key: str | Sequence[str | None] | None = None,
        headers: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        conn: object | None = None,
    ) -> list[int]:
        """Publish many events in one statement; returns their ids, in order.

        `type`, `key` and `headers` are one for all, or one for each.
        """
        if not payloads:
            return []
        with Sending("publish", self.name, headers, len(payloads)) as carried:
            kind, *columns = batch_of(self._codec, self.name, payloads, type=type, key=key, headers=carried)
            query = _sql.PUBLISH_BATCH.format(kind=kind)
            found: list[int] = (self.bus.fetch(query, (self.name, *columns), conn))[0][0]
            return found

    def group(self, name: str, *, create: bool = True, **options: Any) -> Group[T]:
        """A group by name. It is made if it does not exist, unless `create` is False.

        Args:
            name: of the group.
            create: make it if it does not exist.
            options: for a group that is made, as for ``postbus.create_group`` (``ordering="key"``,
                ``start="earliest"``, ``max_attempts=5``).
        """
        if options and not create:
            raise BadArgument(f"options of group {name!r} need create=True: {', '.join(options)}")
        if create:
            self.bus.create("group", self.name, name, options=options)
        return Group(self, name)


class Group(Generic[T]):
    """A named reader of a stream.

    Example:
        >>> billing = orders.group("billing", start="earliest")  # doctest: +SKIP
        >>> for m in billing.messages(wait=0):  # doctest: +SKIP
        ...     bill(m.payload)
    """

    def __init__(self, stream: Stream[T], name: str) -> None:
        self.bus = stream.bus
        self.stream = stream
        self.name = name
        self._ordering: str | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.stream.name!r}>"

    def consume(
        self, max: int = 100, *, lease: float | None = None, wait: float = 0, conn: object | None = None
    ) -> Batch[T]:
        """Take the next events, to loop over: leaving the body acks, an exception nacks.

        Args:
            max: the most to take.
            lease: seconds until others may have them; default: that of the group. The loop extends it.
            wait: seconds to wait for a first event.
            conn: a connection of yours. They are then taken in your transaction, and finished in it: if it
                rolls back, they never were taken.
        """
        params = (self.stream.name, self.name, max, lease, self.bus.name)
        taken_at = time.monotonic()

        def take() -> list[tuple[Any, ...]]:
            nonlocal taken_at
            taken_at = time.monotonic()
            return self.bus.fetch(_sql.CONSUME, params, conn)

        rows = self.bus.wait_for(self.channel, wait, take, self.next_due)
        ordering = self.ordering(conn)
        batch = Batch(self, rows, lease=lease, taken_at=taken_at, conn=conn, ordering=ordering)
        batch.bury()
        return batch

    def messages(
        self,
        *,
        max: int = 100,
        prefetch: int | None = None,
        lease: float | None = None,
        wait: float | None = None,
    ) -> Messages[T]:
        """Loop over events as they come.

        Args:
            max: how many to take in one call.
            prefetch: how many may be on leases of ours at a time; default: twice `max`.
            lease: seconds; default: that of the group. Leases are extended in the background.
            wait: end the loop when there was nothing for so many seconds; default: never.
        """
        return Messages(self, max=max, prefetch=prefetch, lease=lease, wait=wait)

    def batches(
        self,
        *,
        max: int = 100,
        prefetch: int | None = None,
        lease: float | None = None,
        wait: float | None = None,
    ) -> Batches[T]:
        """Loop over batches of up to `max` events as they come; otherwise as `messages`."""
        return Batches(self, max=max, prefetch=prefetch, lease=lease, wait=wait)

    def __iter__(self) -> Messages[T]:
        return self.messages()

    def seek(self, position: str | int | datetime) -> None:
        """Move the group.

        What is on leases then is no longer: acks of it come too late.

        Args:
            position: ``earliest``, ``latest``, the id of an event, a time with its zone, or what else
                ``postbus.seek`` takes.
        """
        if isinstance(position, datetime):
            query, where = _sql.SEEK_TIME, str(moment("position", position))
        else:
            query, where = _sql.SEEK, f"id:{position}" if isinstance(position, int) else position
        self.bus.fetch(query, (self.stream.name, self.name, where))

    def dead_letters(self, max: int = 100, *, after: int = 0) -> list[DeadLetter[Any]]:
        """The events that this group has given up, the oldest first, with the reason.

        Args:
            max: the most to return.
            after: only those with a larger `letter`: the next page.
        """
        rows = self.bus.fetch(_sql.DEAD_LETTERS, (self.stream.name, self.name, max, after))
        return [dead_letter_of(self.stream.name, self.name, self.codec_of(row[3]), row) for row in rows]

    def redrive(self, ids: Letters = None) -> int:
        """Send dead letters to this group again: these (or their `letter`), or all; returns how many."""
        params = (self.stream.name, letters_of(ids), self.name)
        return int((self.bus.fetch(_sql.REDRIVE, params))[0][0])

    def take(self, max: int, lease: float | None) -> list[tuple[Any, ...]]:
        """For consumers: rows on a lease."""
        return self.bus.fetch(_sql.CONSUME, (self.stream.name, self.name, max, lease, self.bus.name))

    @property
    def channel(self) -> str:
        """For consumers: what to listen to."""
        return self.stream.name

    @property
    def label(self) -> str:
        """For consumers: what it is called in the log."""
        return f"{self.stream.name}/{self.name}"

    def ordering(self, conn: object | None = None) -> str:
        """For consumers: ``key``, ``stream`` or ``none``."""
        if self._ordering is None:
            rows = self.bus.fetch(_sql.ORDERING, (self.stream.name, self.name), conn)
            if not rows:
                raise NotFound(f"stream {self.stream.name!r} has no group {self.name!r}")
            self._ordering = str(rows[0][0])
        return self._ordering

    def codec_of(self, type: str) -> Codec:
        """For consumers: what decodes events of a type."""
        return self.stream._codec

    def deliver(self, row: tuple[Any, ...], consumer: Any) -> Delivery[T]:
        """For consumers: a row as a message."""
        number, kind, key, text, blob, headers, created_at, attempt, receipt, batch, _, _ = row
        return Delivery(
            source=self.stream.name,
            group=self.name,
            id=number,
            payload=self.codec_of(kind).decode(text, blob, headers),
            type=kind,
            key=key,
            headers=headers or {},
            created_at=created_at,
            attempt=attempt,
            receipt=receipt,
            batch=batch,
            _bus=self.bus,
            _consumer=consumer,
        )

    def default_lease(self) -> float:
        """The lease of the group, in seconds."""
        return float((self.bus.fetch(_sql.DEFAULT_LEASE, (self.stream.name, self.name)))[0][0])

    def next_due(self) -> float | None:
        """Not known for streams: consumers look once a second."""
        return None
