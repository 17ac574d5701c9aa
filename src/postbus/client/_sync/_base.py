# Generated from ../_async/_base.py by tools/gen_sync.py ("make format"): edit that one.
"""The connections of a bus: its pool, its listener, and what happens to the loops when it closes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import Connection
from psycopg_pool import ConnectionPool

from postbus.client._compat import Event, Lock, run
from postbus.client._connect import Target, is_quiet, look_at, pool_options, worker_name
from postbus.client._foreign import fetch
from postbus.client._listener import Listener
from postbus.client._pace import pause
from postbus.errors import BadArgument, translated
from postbus.serializers import Serializer

if TYPE_CHECKING:
    from postbus.client._sync._consumer import Consumer


class Base:
    """What a bus has below its verbs. The arguments are those of `Bus`."""

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
        self._pool: ConnectionPool[Connection[Any]] | None = None
        self._listener: Listener | None = None
        self._consumers: set[Consumer[Any]] = set()
        self._opening = Lock()

    def open(self) -> None:
        """Connect, and check that the engine is there and fits; again is fine."""
        with self._opening:
            if self._pool is not None:
                return
            dsn = run(self._target.start)
            try:
                pool = ConnectionPool(
                    dsn,
                    connection_class=Connection[Any],
                    max_size=self._pool_size,
                    timeout=self._timeout,
                    configure=self._configure,
                    reconnect_failed=self._try_again,
                    open=False,
                    **pool_options(),
                )
                pool.open()
            except BaseException:
                run(self._target.stop)
                raise
            self._pool = pool
            self._listener = Listener(dsn)

    def close(self) -> None:
        """End all loops, give back what they had taken, and disconnect; again is fine."""
        consumers = list(self._consumers)
        for consumer in consumers:
            consumer.abandon()
            consumer.hurry()
        try:
            for consumer in consumers:
                consumer.close()
        finally:
            pool, listener = self._pool, self._listener
            self._pool = self._listener = None
            if listener is not None:
                run(listener.close)
            if pool is not None:
                pool.close()
            run(self._target.stop)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(self, query: str, params: tuple[Any, ...], conn: object | None = None) -> list[tuple[Any, ...]]:
        """The rows of one statement, on a connection of the pool or on the given one."""
        if conn is not None:
            return fetch(conn, query, params)
        with self.connection() as own:
            cursor = own.cursor(binary=True)
            with translated():
                cursor.execute(query, params)
            return cursor.fetchall()

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A connection of the pool, in autocommit mode: for transactions of your own.

        Example:
            >>> with bus.connection() as conn, conn.transaction():  # doctest: +SKIP
            ...     conn.execute("insert into customer values (1)")
            ...     emails.send({"customer": 1}, conn=conn)
        """
        pool = self._opened()
        conn = self._open_connection(pool)
        try:
            with conn:
                yield conn
        finally:
            pool.putconn(conn)

    def _open_connection(self, pool: ConnectionPool[Connection[Any]]) -> Connection[Any]:
        """One that the server has not closed meanwhile."""
        end = time.monotonic() + self._timeout
        while True:
            conn = pool.getconn(timeout=max(0.0, end - time.monotonic()))
            if is_quiet(conn):
                return conn
            # Not the check of the pool, which would sleep for longer and longer between two tries.
            try:
                ConnectionPool.check_connection(conn)
                return conn
            except BaseException as exc:
                pool.putconn(conn)
                if not isinstance(exc, psycopg.OperationalError):
                    raise

    def wait_for(
        self,
        name: str,
        seconds: float,
        take: Callable[[], list[tuple[Any, ...]]],
        next_due: Callable[[], float | None],
    ) -> list[tuple[Any, ...]]:
        """Take until there is something, for at most so many seconds."""
        rows = take()
        if rows or seconds <= 0:
            return rows
        end = time.monotonic() + seconds
        news = Event()
        unsubscribe = self.listener.subscribe(name, news.set_from_thread)
        empty = 0
        try:
            while True:
                news.clear()
                rows = take()
                left = end - time.monotonic()
                if rows or left <= 0:
                    return rows
                empty += 1
                if news.wait_for(min(left, pause(self.listener.works, empty, next_due()))):
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
    def pool(self) -> ConnectionPool[Connection[Any]]:
        """The pool of connections. `connection` gives one that is known to be open."""
        return self._opened()

    @property
    def listener(self) -> Listener:
        """What hears of news."""
        self._opened()
        assert self._listener is not None
        return self._listener

    def adopt(self, consumer: Consumer[Any]) -> None:
        """Close it with the bus."""
        self._consumers.add(consumer)

    def disown(self, consumer: Consumer[Any]) -> None:
        """It is closed."""
        self._consumers.discard(consumer)

    def _opened(self) -> ConnectionPool[Connection[Any]]:
        if self._pool is None:
            raise BadArgument("the bus is not open", hint="Use it in a with block, or call open() first.")
        return self._pool

    def _configure(self, conn: Connection[Any]) -> None:
        cursor = conn.execute("select pg_backend_pid()", prepare=False)
        look_at(conn, cursor.fetchone())

    def _try_again(self, pool: ConnectionPool[Connection[Any]]) -> None:
        """The pool has given up trying to connect: not while anybody waits for it."""
        if pool.get_stats().get("requests_waiting"):
            pool.check()
