# Generated from ../_async/_bus.py by tools/gen_sync.py ("make format"): edit that one.
"""The bus: queues and streams by name, and the verbs that need neither."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec
from psycopg.errors import InsufficientPrivilege

from postbus.client import _sql
from postbus.client._ending import ending, transaction_of
from postbus.client._message import Message
from postbus.client._outcome import storable
from postbus.client._sync._base import Base
from postbus.errors import AlreadyExists, BadArgument
from postbus.serializers import Codec, Serializer

if TYPE_CHECKING:
    from postbus.client._sync._queue import Queue
    from postbus.client._sync._stream import Stream

T = TypeVar("T")
Receipts = Message[Any] | str | Iterable[Message[Any] | str]


class Bus(Base):
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


def as_json(value: Any) -> str:
    """JSON text."""
    return msgspec.json.encode(value).decode()


def list_of(messages: Receipts) -> list[Message[Any] | str]:
    """One or many messages or receipts."""
    return [messages] if isinstance(messages, Message | str) else list(messages)


def receipts_of(messages: list[Message[Any] | str]) -> list[str]:
    """The receipts of messages."""
    return [m if isinstance(m, str) else m.receipt for m in messages]
