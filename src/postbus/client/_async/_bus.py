"""The bus: a pool of connections, and the verbs that need no queue or stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec
import psycopg
from psycopg import AsyncConnection
from psycopg.errors import InsufficientPrivilege
from psycopg_pool import AsyncConnectionPool

from postbus.client import _sql
from postbus.client._compat import AEvent, ALock, arun
from postbus.client._connect import Target, is_quiet, look_at, pool_options, worker_name
from postbus.client._ending import ending, transaction_of
from postbus.client._foreign import fetch_async
from postbus.client._listener import Listener
from postbus.client._message import Message
from postbus.client._outcome import storable
from postbus.client._pace import pause
from postbus.errors import AlreadyExists, BadArgument, translated
from postbus.serializers import Codec, Serializer

if TYPE_CHECKING:
    from postbus.client._async._consumer import AsyncConsumer
    from postbus.client._async._queue import AsyncQueue
    from postbus.client._async._stream import AsyncStream

T = TypeVar("T")
Receipts = Message[Any] | str | Iterable[Message[Any] | str]


class AsyncBus:
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

    def __init__(
        self,
        dsn: str | None = None,
        *,
        name: str | None = None,
        pool_size: int = 10,
        serializer: Serializer | None = None,
        install: bool = False,
        timeout: float = 30.0,
    ) -> None:
        if pool_size < 1:
            raise BadArgument(f"pool_size must be at least 1, not {pool_size}")
        self.name = name or worker_name()
        self.serializer = serializer
        self._target = Target(dsn, install=install)
        self._pool_size = pool_size
        self._timeout = timeout
        self._pool: AsyncConnectionPool[AsyncConnection[Any]] | None = None
        self._listener: Listener | None = None
        self._consumers: set[AsyncConsumer[Any]] = set()
        self._opening = ALock()

    async def open(self) -> None:
        """Connect, and check that the engine is there and fits; again is fine."""
        async with self._opening:
            if self._pool is not None:
                return
            dsn = await arun(self._target.start)
            try:
                pool = AsyncConnectionPool(
                    dsn,
                    connection_class=AsyncConnection[Any],
                    max_size=self._pool_size,
                    timeout=self._timeout,
                    configure=self._configure,
                    reconnect_failed=self._try_again,
                    open=False,
                    **pool_options(),
                )
                await pool.open()
            except BaseException:
                await arun(self._target.stop)
                raise
            self._pool = pool
            self._listener = Listener(dsn)

    async def close(self) -> None:
        """End all loops, give back what they had taken, and disconnect; again is fine."""
        consumers = list(self._consumers)
        for consumer in consumers:
            consumer.abandon()
            consumer.hurry()
        try:
            for consumer in consumers:
                await consumer.close()
        finally:
            pool, listener = self._pool, self._listener
            self._pool = self._listener = None
            if listener is not None:
                await arun(listener.close)
            if pool is not None:
                await pool.close()
            await arun(self._target.stop)

    async def __aenter__(self) -> AsyncBus:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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

    async def fetch(
        self, query: str, params: tuple[Any, ...], conn: object | None = None
    ) -> list[tuple[Any, ...]]:
        """The rows of one statement, on a connection of the pool or on the given one."""
        if conn is not None:
            return await fetch_async(conn, query, params)
        async with self.connection() as own:
            cursor = own.cursor(binary=True)
            with translated():
                await cursor.execute(query, params)
            return await cursor.fetchall()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """A connection of the pool, in autocommit mode: for transactions of your own.

        Example:
            >>> async with bus.connection() as conn, conn.transaction():  # doctest: +SKIP
            ...     await conn.execute("insert into customer values (1)")
            ...     await emails.send({"customer": 1}, conn=conn)
        """
        pool = self._opened()
        conn = await self._open_connection(pool)
        try:
            async with conn:
                yield conn
        finally:
            await pool.putconn(conn)

    async def _open_connection(self, pool: AsyncConnectionPool[AsyncConnection[Any]]) -> AsyncConnection[Any]:
        """One that the server has not closed meanwhile."""
        end = time.monotonic() + self._timeout
        while True:
            conn = await pool.getconn(timeout=max(0.0, end - time.monotonic()))
            if is_quiet(conn):
                return conn
            # Not the check of the pool, which would sleep for longer and longer between two tries.
            try:
                await AsyncConnectionPool.check_connection(conn)
                return conn
            except psycopg.OperationalError:
                await pool.putconn(conn)

    async def wait_for(
        self,
        name: str,
        seconds: float,
        take: Callable[[], Awaitable[list[tuple[Any, ...]]]],
        next_due: Callable[[], Awaitable[float | None]],
    ) -> list[tuple[Any, ...]]:
        """Take until there is something, for at most so many seconds."""
        rows = await take()
        if rows or seconds <= 0:
            return rows
        end = time.monotonic() + seconds
        news = AEvent()
        unsubscribe = self.listener.subscribe(name, news.set_from_thread)
        empty = 0
        try:
            while True:
                news.clear()
                rows = await take()
                left = end - time.monotonic()
                if rows or left <= 0:
                    return rows
                empty += 1
                if await news.wait_for(min(left, pause(self.listener.works, empty, await next_due()))):
                    empty = 0
        finally:
            unsubscribe()

    @property
    def dsn(self) -> str:
        """The database that the bus is connected to: for connections of your own."""
        dsn = self._opened().conninfo
        assert isinstance(dsn, str)
        return dsn

    @property
    def pool(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        """The pool of connections. `connection` gives one that is known to be open."""
        return self._opened()

    @property
    def listener(self) -> Listener:
        """What hears of news."""
        self._opened()
        assert self._listener is not None
        return self._listener

    def adopt(self, consumer: AsyncConsumer[Any]) -> None:
        """Close it with the bus."""
        self._consumers.add(consumer)

    def disown(self, consumer: AsyncConsumer[Any]) -> None:
        """It is closed."""
        self._consumers.discard(consumer)

    def _opened(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        if self._pool is None:
            raise BadArgument("the bus is not open", hint="Use it in a with block, or call open() first.")
        return self._pool

    async def _configure(self, conn: AsyncConnection[Any]) -> None:
        cursor = await conn.execute("select pg_backend_pid()", prepare=False)
        look_at(conn, await cursor.fetchone())

    async def _try_again(self, pool: AsyncConnectionPool[AsyncConnection[Any]]) -> None:
        """The pool has given up trying to connect: not while anybody waits for it."""
        if pool.get_stats().get("requests_waiting"):
            await pool.check()


def as_json(value: Any) -> str:
    """JSON text."""
    return msgspec.json.encode(value).decode()


def list_of(messages: Receipts) -> list[Message[Any] | str]:
    """One or many messages or receipts."""
    return [messages] if isinstance(messages, Message | str) else list(messages)


def receipts_of(messages: list[Message[Any] | str]) -> list[str]:
    """The receipts of messages."""
    return [m if isinstance(m, str) else m.receipt for m in messages]
