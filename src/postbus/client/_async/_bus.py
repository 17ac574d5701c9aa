"""The bus: queues and streams by name, and the verbs that need neither."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec
from psycopg.errors import InsufficientPrivilege

from postbus.client import _sql
from postbus.client._async._base import AsyncBase
from postbus.client._ending import ending, transaction_of
from postbus.client._message import Message
from postbus.client._outcome import storable
from postbus.errors import AlreadyExists, BadArgument
from postbus.serializers import Codec, Serializer

if TYPE_CHECKING:
    from postbus.client._async._queue import AsyncQueue
    from postbus.client._async._stream import AsyncStream

T = TypeVar("T")
Receipts = Message[Any] | str | Iterable[Message[Any] | str]


class AsyncBus(AsyncBase):
    """A connection to Postbus.

    Nothing connects before ``async with`` (or `open`). Calls take a connection from the pool and are
    committed when they return; with ``conn=`` they become part of your own transaction instead, on a
    connection of psycopg, asyncpg, SQLAlchemy or Django.

    Args:
        dsn: the database; else ``$POSTBUS_DSN``, else an embedded PostgreSQL, which is started and gets the
            engine.
        name: what consumers of this bus are called in the database; default: host and process.
        pool_size: the most connections. One more listens for news.
        serializer: for queues and streams that have none of their own; default: JSON.
        install: put the engine into the database if it is not there.
        timeout: seconds to wait for a connection.

    Example:
        >>> async with AsyncBus() as bus:  # doctest: +SKIP
        ...     emails = await bus.queue("emails", create=True)
        ...     await emails.send({"to": "someone@example.com"})
    """

    @overload
    async def queue(
        self,
        name: str,
        model: type[T],
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> AsyncQueue[T]: ...

    @overload
    async def queue(
        self,
        name: str,
        model: None = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> AsyncQueue[Any]: ...

    async def queue(
        self,
        name: str,
        model: Any = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> AsyncQueue[Any]:
        """A queue by name.

        Args:
            name: of the queue.
            model: what payloads are decoded into and checked against: a dataclass, msgspec struct,
                TypedDict or pydantic model. Default: plain Python values.
            create: make it if it does not exist.
            serializer: for its payloads; default: that of the bus.
            options: for a queue that is made, as for ``postbus.create_queue`` (``max_attempts=5``).
        """
        from postbus.client._async._queue import AsyncQueue

        if options and not create:
            raise BadArgument(f"options of queue {name!r} need create=True: {', '.join(options)}")
        if create:
            await self.create("queue", name, options=options)
        return AsyncQueue(self, name, Codec(serializer or self.serializer, model))

    @overload
    async def stream(
        self,
        name: str,
        model: type[T],
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> AsyncStream[T]: ...

    @overload
    async def stream(
        self,
        name: str,
        model: None = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> AsyncStream[Any]: ...

    async def stream(
        self,
        name: str,
        model: Any = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> AsyncStream[Any]:
        """A stream by name.

        The arguments are those of `queue`, the options those of ``postbus.create_stream``.
        """
        from postbus.client._async._stream import AsyncStream

        if options and not create:
            raise BadArgument(f"options of stream {name!r} need create=True: {', '.join(options)}")
        if create:
            await self.create("stream", name, options=options)
        return AsyncStream(self, name, Codec(serializer or self.serializer, model))

    async def create(self, kind: str, *names: str, options: dict[str, Any]) -> None:
        """Make a queue, stream or group unless it is there."""
        marks = ", ".join(["%s::text"] * len(names))
        try:
            await self.fetch(f"select postbus.create_{kind}({marks}, %s::jsonb)", (*names, as_json(options)))
        except AlreadyExists as exc:
            # Queues and streams share one space of names.
            if kind != "group" and not exc.message.startswith(kind):
                raise
        except InsufficientPrivilege:
            # Whoever may not make it may still use it.
            if not await self._exists(kind, *names):
                raise

    async def _exists(self, kind: str, *names: str) -> bool:
        query = _sql.EXISTS[kind]
        return bool(await self.fetch(query, names))

    async def ack(self, messages: Receipts, *, conn: object | None = None) -> int:
        """Finish messages for good: all of them, or with `LeaseLost` none. Returns how many."""
        return await self._tell(_sql.ACK, messages, (), conn)

    async def nack(
        self,
        messages: Receipts,
        *,
        delay: float | None = None,
        reason: str | None = None,
        state: Any = None,
        conn: object | None = None,
    ) -> int:
        """Give messages back, to come again after `delay` seconds; the other arguments as for a delivery."""
        rest = (delay, storable(reason), None if state is None else as_json(state))
        return await self._tell(_sql.NACK, messages, rest, conn, goes_back=True)

    async def extend(
        self, messages: Receipts, *, lease: float | None = None, state: Any = None, conn: object | None = None
    ) -> datetime:
        """Keep messages for at least `lease` more seconds; returns when the first of the leases ends."""
        found = list_of(messages)
        if not found:
            raise BadArgument("there is nothing to extend")
        params = (receipts_of(found), lease, None if state is None else as_json(state))
        until: datetime = (await self.fetch(_sql.EXTEND, params, transaction_of(found, conn)))[0][0]
        return until

    async def dead_letter(
        self, messages: Receipts, *, reason: str | None = None, conn: object | None = None
    ) -> int:
        """Give messages up: they go to the dead letters now."""
        return await self._tell(_sql.DEAD_LETTER, messages, (storable(reason),), conn)

    async def release(self, messages: Receipts, *, conn: object | None = None) -> int:
        """Give messages back as if they had never been taken."""
        return await self._tell(_sql.RELEASE, messages, (), conn, goes_back=True)

    async def _tell(
        self,
        query: str,
        messages: Receipts,
        rest: tuple[Any, ...],
        conn: object | None,
        *,
        goes_back: bool = False,
    ) -> int:
        found = list_of(messages)
        if not found:
            return 0
        conn = transaction_of(found, conn)
        with ending(found, goes_back=goes_back) as behind:
            if behind:
                await self.fetch(_sql.RELEASE, (behind,), conn)
            return int((await self.fetch(query, (receipts_of(found), *rest), conn))[0][0])

    async def maintain(self) -> None:
        """Do the upkeep of the database once; workers do it by themselves."""
        await self.fetch("select postbus.maintain()", ())


def as_json(value: Any) -> str:
    """JSON text."""
    return msgspec.json.encode(value).decode()


def list_of(messages: Receipts) -> list[Message[Any] | str]:
    """One or many messages or receipts."""
    return [messages] if isinstance(messages, Message | str) else list(messages)


def receipts_of(messages: list[Message[Any] | str]) -> list[str]:
    """The receipts of messages."""
    return [m if isinstance(m, str) else m.receipt for m in messages]
