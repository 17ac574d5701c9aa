"""Running a worker until there is nothing more for it to do."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, LiteralString

import psycopg

from postbus.client import Message
from postbus.errors import BadArgument, LeaseLost, PostbusError, Undecodable
from postbus.serializers import Codec
from postbus.worker import GiveUp, Retry, Worker
from postbus.worker._calls import TooLate
from postbus.worker._handler import Call, Handler

LOOK_EVERY = 0.002
_LETTERS = """select d.id, d.event_id, d.type, d.key, d.payload, d.blob, d.headers, d.created_at, d.attempt
    from postbus.dead_letters(%s::text, %s::text, 2147483647, %s::bigint) d"""


@dataclass(frozen=True)
class Handled:
    """A message that a handler was called with.

    Attributes:
        message: it.
        outcome: ``done``: the handler returned; ``retried``: it comes again; ``dead``: it went to the dead
            letters; ``lost``: the lease ended before the handler did.
        error: what the handler raised, or None.
    """

    message: Message[Any]
    outcome: Literal["done", "retried", "dead", "lost"]
    error: BaseException | None = None


def drain(worker: Worker, dsn: str, *, timeout: float = 10.0, raises: bool = True) -> list[Handled]:
    """Run a worker on a database until there is nothing more to do, and return what it handled.

    See `drain_async`; this one is for code that is not in an event loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(drain_async(worker, dsn, timeout=timeout, raises=raises))
    raise BadArgument("drain would stop this event loop", hint="Use async_drain here, and await it.")


async def drain_async(
    worker: Worker,
    dsn: str,
    *,
    timeout: float = 10.0,  # noqa: ASYNC109 - says what is left when it is over
    raises: bool = True,
) -> list[Handled]:
    """Run a worker on a database until there is nothing more to do, and return what it handled.

    The upkeep is done first, so that schedules fire that are due. What is delayed stays where it is, and so
    does what failed and waits for its next attempt: move the clock, and drain again.

    Args:
        worker: its handlers are called, on `dsn` whatever its own is.
        dsn: the database.
        timeout: seconds for all of it.
        raises: raise what a handler raised, the first if there were several; `Retry` and `GiveUp` are
            wishes, not failures. A message that no handler can decode is a failure too. False: report only.

    Raises:
        TimeoutError: there was still something to do, or a handler did not end.
    """
    notes = _Notes(worker)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("select postbus.maintain()")
        newest = await _one(conn, "select coalesce(max(id), 0) from postbus.dead_letter")
        with notes.kept(dsn):
            running = asyncio.create_task(worker.run())
            try:
                async with asyncio.timeout(timeout) as limit:
                    while not running.done() and not await notes.nothing_left():  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_EVERY)
                worker.stop()
                await running
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimeoutError(f"not drained after {timeout:g} seconds: {notes}") from None
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
        handled = await notes.settled(conn, newest)
    failed = [h for h in handled if h.error is not None and not isinstance(h.error, Retry | GiveUp)]
    if raises and failed:
        raise _told(failed)
    return handled


class _Notes:
    """What a worker does, noted while it runs."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._name = f"drain-{uuid.uuid4().hex[:8]}"
        self._begun = 0
        self._ended = 0
        self._handled: list[Handled] = []

    def __str__(self) -> str:
        return f"{self._ended} handled, {self._begun - self._ended} at work"

    @contextmanager
    def kept(self, dsn: str) -> Iterator[None]:
        """Have the worker work for this test: on its database, under a name that nobody else has."""
        mine: dict[str, Any] = {"dsn": dsn, "name": self._name, "health": None, "maintain": False}
        mine["middleware"] = [self._around, *self._worker.middleware]
        before = {name: getattr(self._worker, name) for name in mine}
        vars(self._worker).update(mine)
        try:
            yield
        finally:
            vars(self._worker).update(before)

    async def _around(self, m: Message[Any], call_next: Call) -> Any:
        self._begun += 1
        began = time.monotonic()
        try:
            result = await call_next(m)
        except (TooLate, LeaseLost) as exc:
            self._handled.append(Handled(m.plain(), "lost", exc))
            raise
        except asyncio.CancelledError:
            self._handled.append(self._cancelled(m.plain(), time.monotonic() - began))
            raise
        except BaseException as exc:
            self._handled.append(Handled(m.plain(), "retried", exc))
            raise
        else:
            self._handled.append(Handled(m.plain(), "done"))
            return result
        finally:
            self._ended += 1

    def _cancelled(self, m: Message[Any], after: float) -> Handled:
        """What it means that a handler was cancelled."""
        for handler in self._handlers_of(m.source, m.group, m.type):
            if handler.timeout is not None and after > handler.timeout - 0.01:
                return Handled(m, "retried", TimeoutError(f"not done after {handler.timeout:g} seconds"))
        return Handled(m, "lost", LeaseLost("the lease ended"))

    def _handlers_of(self, source: str, group: str | None, type: str) -> list[Handler]:
        found = [h for h in self._worker.handlers if (h.source, h.group) == (source, group)]
        return [h for h in found if h.type == type] or [h for h in found if h.type is None]

    async def nothing_left(self) -> bool:
        """Whether the worker looks everywhere and finds nothing, with no handler at work meanwhile.

        Only looks that begin now count: before, handlers may have sent to each other.
        """
        begun, marks = self._begun, []
        for subscription in self._worker.subscriptions:
            if subscription.problem is not None:
                raise PostbusError(f"{subscription.name}: {subscription.problem}")
            consumer = subscription._consumer
            if consumer is None:
                return False
            marks.append((subscription, consumer, consumer._looks))
            consumer._nudge.set()
        while begun == self._begun == self._ended and marks:
            if any(subscription._consumer is not consumer for subscription, consumer, _ in marks):
                return False
            if all(consumer._dry > mark for _, consumer, mark in marks):
                return True
            await asyncio.sleep(LOOK_EVERY)
        return False

    async def settled(self, conn: psycopg.AsyncConnection[Any], newest: int) -> list[Handled]:
        """All of it, and which of it ended in the dead letters: there the queue has its say as well."""
        for source, group in {(h.source, h.group) for h in self._worker.handlers}:
            cursor = await conn.execute(_LETTERS, (source, group, newest))
            for row in await cursor.fetchall():
                self._bury(source, group, row)
        return self._handled

    def _bury(self, source: str, group: str | None, row: tuple[Any, ...]) -> None:
        _, number, kind, key, text, blob, headers, created_at, attempt = row
        for n, handled in reversed(list(enumerate(self._handled))):
            if (handled.message.source, handled.message.group, handled.message.id) == (source, group, number):
                self._handled[n] = replace(handled, outcome="dead")
                return
        # No handler has seen it. If that is because it cannot be decoded, somebody should know.
        for handler in self._handlers_of(source, group, kind):
            try:
                Codec(handler.serializer, handler.model).decode(text, blob, headers)
            except Undecodable as exc:
                m = Message(
                    source=source,
                    group=group,
                    id=number,
                    payload=blob if text is None else text,
                    type=kind,
                    key=key,
                    headers=headers or {},
                    created_at=created_at,
                    attempt=attempt,
                )
                self._handled.append(Handled(m, "dead", exc))


async def _one(conn: psycopg.AsyncConnection[Any], query: LiteralString, *params: object) -> Any:
    row = await (await conn.execute(query, params)).fetchone()
    return None if row is None else row[0]


def _told(failed: list[Handled]) -> BaseException:
    """The first failure, with a note of which message it was and of the others."""
    first = failed[0]
    assert first.error is not None
    m = first.message
    first.error.add_note(f"raised for message {m.id} of {m.source!r}, outcome: {first.outcome}")
    for other in failed[1:]:
        error = f"{type(other.error).__qualname__}: {other.error}"
        first.error.add_note(f"also for message {other.message.id} of {other.message.source!r}: {error}")
    return first.error
