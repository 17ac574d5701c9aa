# Generated from ../_async/_bus.py by tools/gen_sync.py ("make format"): edit that one.
"""The bus: a pool of connections, and the verbs that need no queue or stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec
import psycopg
from psycopg import Connection
from psycopg.errors import InsufficientPrivilege
from psycopg_pool import ConnectionPool

from postbus.client import _sql
from postbus.client._compat import Event, Lock, run
from postbus.client._connect import Target, is_quiet, look_at, pool_options, worker_name
from postbus.client._ending import ending, transaction_of
from postbus.client._foreign import fetch
from postbus.client._listener import Listener
from postbus.client._message import Message
from postbus.client._outcome import storable
from postbus.client._pace import pause
from postbus.errors import AlreadyExists, BadArgument, translated
from postbus.serializers import Codec, Serializer

if TYPE_CHECKING:
    from postbus.client._sync._consumer import Consumer
    from postbus.client._sync._queue import Queue
    from postbus.client._sync._stream import Stream

T = TypeVar("T")
Receipts = Message[Any] | str | Iterable[Message[Any] | str]


class Bus:
    """A connection to Postbus.

    Nothing connects before ``with`` (or `open`). Calls take a connection from the pool and are
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
        >>> with Bus() as bus:  # doctest: +SKIP
        ...     emails = bus.queue("emails", create=True)
        ...     emails.send({"to": "someone@example.com"})
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

    def __enter__(self) -> Bus:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @overload
    def queue(
        self,
        name: str,
        model: type[T],
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Queue[T]: ...

    @overload
    def queue(
        self,
        name: str,
        model: None = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Queue[Any]: ...

    def queue(
        self,
        name: str,
        model: Any = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Queue[Any]:
        """A queue by name.

        Args:
            name: of the queue.
            model: what payloads are decoded into and checked against: a dataclass, msgspec struct,
                TypedDict or pydantic model. Default: plain Python values.
            create: make it if it does not exist.
            serializer: for its payloads; default: that of the bus.
            options: for a queue that is made, as for ``postbus.create_queue`` (``max_attempts=5``).
        """
        from postbus.client._sync._queue import Queue

        if options and not create:
            raise BadArgument(f"options of queue {name!r} need create=True: {', '.join(options)}")
        if create:
            self.create("queue", name, options=options)
        return Queue(self, name, Codec(serializer or self.serializer, model))

    @overload
    def stream(
        self,
        name: str,
        model: type[T],
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Stream[T]: ...

    @overload
    def stream(
        self,
        name: str,
        model: None = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Stream[Any]: ...

    def stream(
        self,
        name: str,
        model: Any = None,
        *,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Stream[Any]:
        """A stream by name.

        The arguments are those of `queue`, the options those of ``postbus.create_stream``.
        """
        from postbus.client._sync._stream import Stream

        if options and not create:
            raise BadArgument(f"options of stream {name!r} need create=True: {', '.join(options)}")
        if create:
            self.create("stream", name, options=options)
        return Stream(self, name, Codec(serializer or self.serializer, model))

    def create(self, kind: str, *names: str, options: dict[str, Any]) -> None:
        """Make a queue, stream or group unless it is there."""
        marks = ", ".join(["%s::text"] * len(names))
        try:
            self.fetch(f"select postbus.create_{kind}({marks}, %s::jsonb)", (*names, as_json(options)))
        except AlreadyExists as exc:
            # Queues and streams share one space of names.
            if kind != "group" and not exc.message.startswith(kind):
                raise
        except InsufficientPrivilege:
            # Whoever may not make it may still use it.
            if not self._exists(kind, *names):
                raise

    def _exists(self, kind: str, *names: str) -> bool:
        query = _sql.EXISTS[kind]
        return bool(self.fetch(query, names))

    def ack(self, messages: Receipts, *, conn: object | None = None) -> int:
        """Finish messages for good: all of them, or with `LeaseLost` none. Returns how many."""
        return self._tell(_sql.ACK, messages, (), conn)

    def nack(
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
        return self._tell(_sql.NACK, messages, rest, conn, goes_back=True)

    def extend(
        self, messages: Receipts, *, lease: float | None = None, state: Any = None, conn: object | None = None
    ) -> datetime:
        """Keep messages for at least `lease` more seconds; returns when the first of the leases ends."""
        found = list_of(messages)
        if not found:
            raise BadArgument("there is nothing to extend")
        params = (receipts_of(found), lease, None if state is None else as_json(state))
        until: datetime = (self.fetch(_sql.EXTEND, params, transaction_of(found, conn)))[0][0]
        return until

    def dead_letter(
        self, messages: Receipts, *, reason: str | None = None, conn: object | None = None
    ) -> int:
        """Give messages up: they go to the dead letters now."""
        return self._tell(_sql.DEAD_LETTER, messages, (storable(reason),), conn)

    def release(self, messages: Receipts, *, conn: object | None = None) -> int:
        """Give messages back as if they had never been taken."""
        return self._tell(_sql.RELEASE, messages, (), conn, goes_back=True)

    def _tell(
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
                self.fetch(_sql.RELEASE, (behind,), conn)
            return int((self.fetch(query, (receipts_of(found), *rest), conn))[0][0])

    def maintain(self) -> None:
        """Do the upkeep of the database once; workers do it by themselves."""
        self.fetch("select postbus.maintain()", ())

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
            except psycopg.OperationalError:
                pool.putconn(conn)

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


def as_json(value: Any) -> str:
    """JSON text."""
    return msgspec.json.encode(value).decode()


def list_of(messages: Receipts) -> list[Message[Any] | str]:
    """One or many messages or receipts."""
    return [messages] if isinstance(messages, Message | str) else list(messages)


def receipts_of(messages: list[Message[Any] | str]) -> list[str]:
    """The receipts of messages."""
    return [m if isinstance(m, str) else m.receipt for m in messages]
