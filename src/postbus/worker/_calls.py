"""How the function of a handler is called: on the loop, in a thread or a process, in a transaction or not."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from postbus.client import _sql
from postbus.client._async._bus import AsyncBus
from postbus.client._async._consumer import AsyncConsumer
from postbus.client._message import Message
from postbus.client._sync._bus import Bus
from postbus.errors import LeaseLost, translated
from postbus.worker import _processes
from postbus.worker._handler import Call, Handler
from postbus.worker._threads import Threads

log = logging.getLogger("postbus")

_SPARE = 2  # connections for handlers that nobody waits for any more


class TooLate(Exception):  # noqa: N818 - for ourselves
    """The lease was lost before the transaction could commit; it was rolled back."""


class Calls:
    """Threads, processes and connections of one worker, while it runs.

    Handlers get connections of pools of their own: what they set there (a role, a row factory) must not be
    found by the worker itself.
    """

    def __init__(self, dsn: str, handlers: list[Handler]) -> None:
        self.threads = Threads()
        self.processes = _processes.Processes(self.threads)
        on_loop = sum(h.concurrency for h in handlers if h.transactional and h.is_async)
        in_threads = sum(h.concurrency for h in handlers if h.transactional and not h.is_async)
        self._async = AsyncBus(dsn, pool_size=on_loop) if on_loop else None
        self._bus = Bus(dsn, pool_size=in_threads + _SPARE) if in_threads else None

    async def open(self) -> None:
        """Make the pools that are needed; again is fine."""
        if self._async is not None:
            await self._async.open()
        if self._bus is not None:
            await self.threads.run(self._bus.open)

    async def close(self) -> None:
        """Let go of everything; what still runs in threads is left to itself."""
        self.processes.close()
        if self._async is not None:
            await self._async.close()
        if self._bus is not None:
            await self.threads.run(self._bus.close)
        self.threads.close()

    def kill(self) -> None:
        """The process ends now: nothing of ours shall outlive it."""
        self.processes.close()

    def of(self, handler: Handler, committed: set[str]) -> Call:
        """What handles a message.

        Args:
            handler: the handler.
            committed: gets the receipts of messages that were acked in a transaction of the handler.
        """
        if handler.transactional:
            if handler.is_async:
                return self._transaction_on_loop(handler, committed)
            return self._transaction_in_thread(handler, committed)
        function, threads, processes = handler.function, self.threads, self.processes
        if handler.is_async:
            return function
        if handler.process:
            _processes.check(function, handler.what)

            async def in_process(m: Message[Any]) -> None:
                await processes.run(function, m.plain())

            return in_process

        async def in_thread(m: Message[Any]) -> None:
            await threads.run(_processes.called, function, m.plain())

        return in_thread

    def _transaction_on_loop(self, handler: Handler, committed: set[str]) -> Call:
        async def call(m: Message[Any]) -> None:
            assert self._async is not None
            pool = self._async.pool
            conn = await _borrowed(pool, handler)
            try:
                async with conn.transaction():
                    await handler.function(m.plain(), conn)
                    with _finishing(m):
                        await conn.execute(_sql.ACK, ([m.receipt],))
                committed.add(m.receipt)
            except BaseException:
                _not_finished(m)
                raise
            finally:
                await pool.putconn(conn)

        return call

    def _transaction_in_thread(self, handler: Handler, committed: set[str]) -> Call:
        async def call(m: Message[Any]) -> None:
            assert self._bus is not None
            work = _Work(self._bus.pool, handler, committed, m)
            try:
                await self.threads.run(work.run)
            except asyncio.CancelledError:
                # The thread cannot be stopped, but what it asks of the server can.
                await asyncio.shield(asyncio.ensure_future(self.threads.run(work.cancel)))
                raise

        return call


class _Work:
    """A transaction in a thread."""

    def __init__(
        self,
        pool: ConnectionPool[psycopg.Connection[Any]],
        handler: Handler,
        committed: set[str],
        m: Message[Any],
    ) -> None:
        self._pool = pool
        self._handler = handler
        self._committed = committed
        self._m = m
        self._lock = threading.Lock()  # a cancellation must not meet whoever has the connection next
        self._conn: psycopg.Connection[Any] | None = None
        self._cancelled = False

    def run(self) -> None:
        """The effect and the ack commit together, or not at all."""
        conn = self._borrow()
        if conn is None:
            return
        m = self._m
        try:
            with conn.transaction():
                _processes.called(self._handler.function, m.plain(), conn)
                with _finishing(m):
                    conn.execute(_sql.ACK, ([m.receipt],))
            self._committed.add(m.receipt)
        except BaseException:
            _not_finished(m)
            raise
        finally:
            with self._lock:
                self._conn = None
            self._pool.putconn(conn)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancelled = True
        with self._lock, suppress(psycopg.Error, OSError):
            if self._conn is not None:
                self._conn.cancel_safe(timeout=5)

    def _borrow(self) -> psycopg.Connection[Any] | None:
        while not self._cancelled:
            try:
                conn = self._pool.getconn()
            except PoolTimeout:
                _waits(self._handler)
            else:
                conn.row_factory = tuple_row
                self._conn = conn
                return conn
        return None


async def _borrowed(
    pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]], handler: Handler
) -> psycopg.AsyncConnection[Any]:
    """A connection, however long it takes: the handler has not begun, so nothing has failed yet."""
    while True:
        try:
            conn = await pool.getconn()
        except PoolTimeout:
            _waits(handler)
        else:
            conn.row_factory = tuple_row
            return conn


def _waits(handler: Handler) -> None:
    log.warning("%s waits for a connection", handler.what)


@contextmanager
def _finishing(m: Message[Any]) -> Iterator[None]:
    """Around the ack: from here on it finds out itself whether the lease is lost."""
    consumer: AsyncConsumer[Any] | None = getattr(m, "_consumer", None)
    if consumer is not None:
        consumer.finishing(m.receipt)
    try:
        with translated():
            yield
    except LeaseLost as exc:
        raise TooLate(exc.message) from exc


def _not_finished(m: Message[Any]) -> None:
    consumer: AsyncConsumer[Any] | None = getattr(m, "_consumer", None)
    if consumer is not None:
        consumer.not_finished(m.receipt)
