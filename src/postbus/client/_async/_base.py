"""The connections of a bus: its pool, its listener, and what happens to the loops when it closes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from postbus.client._compat import AEvent, ALock, arun
from postbus.client._connect import Target, is_quiet, look_at, pool_options, worker_name
from postbus.client._foreign import fetch_async
from postbus.client._listener import Listener
from postbus.client._pace import pause
from postbus.errors import BadArgument, translated
from postbus.serializers import Serializer

if TYPE_CHECKING:
    from postbus.client._async._consumer import AsyncConsumer


class AsyncBase:
    """What a bus has below its verbs. The arguments are those of `AsyncBus`."""

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

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
            except BaseException as exc:
                await pool.putconn(conn)
                if not isinstance(exc, psycopg.OperationalError):
                    raise

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
