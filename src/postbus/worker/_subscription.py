"""The running side of handlers: takes the messages of one queue or group, calls, settles.

Runners, as many as the handlers' concurrency, pull from one consumer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import psycopg

from postbus.client._async._consumer import AsyncConsumer
from postbus.client._message import Message
from postbus.client._outcome import RELEASE
from postbus.errors import PostbusError
from postbus.worker._attempts import Attempts
from postbus.worker._calls import Calls
from postbus.worker._handler import Handler, wrapped
from postbus.worker._lines import Item, Lines, Part
from postbus.worker._policy import Slot
from postbus.worker._sources import open_source

if TYPE_CHECKING:
    from postbus.worker._worker import Worker

log = logging.getLogger("postbus")

_PAUSE = (0.5, 30.0)  # seconds between two tries, first and at most
_CANCELLED = 2.0  # seconds for handlers to notice that they are cancelled
_CLOSING = 12.0  # seconds for the database to be told what became of messages


class Subscription:
    """One queue, or one group of a stream, with its handlers.

    Attributes:
        name: of the queue, or of the stream and the group.
        attempts: handlers at work, and how many were.
    """

    def __init__(self, worker: Worker, calls: Calls, handlers: list[Handler], rank: int) -> None:
        first = handlers[0]
        self.name = first.source if first.group is None else f"{first.source}/{first.group}"
        self.attempts = Attempts(self.name)
        self._problem: str | None = None
        self._worker = worker
        self._handlers = handlers
        self._slot = Slot(rank, max(h.weight for h in handlers))
        committed = self.attempts.committed
        self._parts = {h.type: Part(h, wrapped(calls.of(h, committed), worker.middleware)) for h in handlers}
        self._ignored = Part(first, _ignore)
        self._consumer: AsyncConsumer[Any] | None = None
        self._lines: Lines | None = None
        self._queued: set[asyncio.Task[Any]] = set()  # those that wait for a token or a slot
        self._at_work: set[asyncio.Task[Any]] = set()  # runners
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._persist(), name=f"postbus-{self.name}")

    def stop(self) -> None:
        """Begin nothing more, and give back what was not begun."""
        self._stopping = True
        if self._consumer is None:
            if self._task is not None:
                self._task.cancel()
            return
        self._consumer.abandon([] if self._lines is None else self._lines.clear(), RELEASE)
        for task in self._queued:
            task.cancel()

    async def finish(self, seconds: float) -> int:
        """After `stop`: wait for the handlers that are at work. Returns how many took too long."""
        if self._task is None:
            return 0
        await asyncio.wait([self._task], timeout=seconds)
        late = len(self.attempts)
        runners = set(self._at_work)
        if runners:
            for task in runners:
                task.cancel()
            _, stubborn = await asyncio.wait(runners, timeout=_CANCELLED)
            if stubborn:
                self._task.cancel()  # what they have stays on its lease
        await asyncio.wait([self._task], timeout=_CLOSING)
        return late

    @property
    def problem(self) -> str | None:
        """What keeps it from work at the moment, if anything does."""
        # It is over when the database has been asked for messages and had no complaint.
        return self._problem if self.fetched_at is None else None

    @property
    def fetched_at(self) -> float | None:
        """When the database was last asked for messages and answered, by the monotonic clock."""
        return None if self._consumer is None else self._consumer.fetched_at

    @property
    def unanswered(self) -> float:
        """For how many seconds the database has not answered."""
        return 0.0 if self._consumer is None else self._consumer.unanswered()

    async def _persist(self) -> None:
        """Work, and begin again when something goes wrong that is not about a message."""
        shortest, longest = _PAUSE
        pause = shortest
        while not self._stopping:
            began = time.monotonic()
            try:
                await self._work()
            except (PostbusError, psycopg.Error, OSError) as exc:
                self._problem = " ".join(str(exc).split())
            except Exception as exc:
                self._problem = f"{type(exc).__qualname__}: {exc}"
                log.exception("%s", self.name)
            if self._stopping:
                return
            if time.monotonic() - began > longest:
                pause = shortest
            log.error("%s: trying again in %g seconds: %s", self.name, pause, self._problem)
            await asyncio.sleep(pause * random.uniform(0.8, 1))  # noqa: S311 - not a secret
            pause = min(longest, pause * 2)

    async def _work(self) -> None:
        """Take and handle messages until `stop`, or until the source fails."""
        handlers = self._handlers
        source = await open_source(self._worker.bus, handlers)
        prefetch = sum(h.prefetch or 2 * h.concurrency for h in handlers)
        lease = max((h.lease for h in handlers if h.lease is not None), default=None)
        consumer = AsyncConsumer(source, max=max(1, prefetch // 2), prefetch=prefetch, lease=lease)
        consumer.on_lost = self.attempts.lose  # type: ignore[method-assign]
        try:
            await consumer.start()
            ordering = await source.ordering()
            self._consumer = consumer
            self._lines = lines = Lines(ordering, self._part_of, consumer.holds)
            for part in (*self._parts.values(), self._ignored):
                part.reset()
            only = self._only()
            count = sum(h.concurrency for h in handlers)
            runners = [self._spawn(self._run(consumer, lines, only)) for _ in range(count)]
            await asyncio.wait(runners, return_when=asyncio.FIRST_EXCEPTION)
            consumer.abandon(lines.clear(), RELEASE)
            while self._at_work:
                await asyncio.wait(self._at_work)
            failures = [runner.exception() for runner in runners if not runner.cancelled()]
            for failure in filter(None, failures):
                raise failure
        finally:
            await consumer.close()
            self._consumer, self._lines = None, None

    def _only(self) -> Part | None:
        """The handler, where there is one, all messages are for it, and nothing but order is to be minded."""
        first = self._handlers[0]
        part = self._parts[first.type]
        if len(self._parts) > 1 or (first.group is not None and first.type is not None):
            return None
        return None if part.bucket or self._worker.slots else part

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"postbus-{self.name}-runner")
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)
        return task

    def _part_of(self, type: str) -> Part:
        return self._parts.get(type) or self._parts.get(None) or self._ignored

    async def _run(self, consumer: AsyncConsumer[Any], lines: Lines, only: Part | None) -> None:
        """Handle one message after the other."""
        done: str | None = None  # the receipt of the one before, which is acked as the next one is taken
        task = current_task()
        while True:
            m = consumer.take_ready(done) or await consumer.take()
            done = None
            if m is None:
                return
            if only is not None and lines.passes(m, only):
                # What most messages are: the way below without its detours.
                try:
                    if await self.attempts.make(consumer, m, only, task):
                        done = m.receipt
                except BaseException:
                    self._give_back(consumer, lines.leave(only, None))
                    raise
                following = lines.leave(only, None)
                if following:
                    if done is not None:
                        consumer.settle(done)
                        done = None
                    await self._follow(consumer, lines, following)
                continue
            item = lines.enter(m)
            if item is not None:
                await self._follow(consumer, lines, [item])

    async def _follow(self, consumer: AsyncConsumer[Any], lines: Lines, items: list[Item]) -> None:
        """Handle messages, the first of them here, and then what may begin because it is done."""
        while items:
            item = items[0]
            for each in items[1:]:
                self._spawn(self._follow(consumer, lines, [each]))
            try:
                await self._begin(consumer, item)
            except BaseException:
                self._give_back(consumer, lines.leave(item.part, item.line))
                raise
            items = lines.leave(item.part, item.line)

    def _give_back(self, consumer: AsyncConsumer[Any], items: list[Item]) -> None:
        for each in items:
            consumer.settle(each.m.receipt, RELEASE)

    async def _begin(self, consumer: AsyncConsumer[Any], item: Item) -> None:
        """Handle a message when its handler's rate and the worker's slots allow."""
        m, part, slots = item.m, item.part, self._worker.slots
        if part is self._ignored:
            consumer.settle(m.receipt)  # an event that this group does not care for
            return
        waits = part.bucket is not None or slots is not None
        task = current_task()
        if waits:
            self._queued.add(task)
            try:
                if part.bucket is not None:
                    await part.bucket.take()
                if slots is not None:
                    await slots.acquire(self._slot)
            except asyncio.CancelledError:
                consumer.settle(m.receipt, RELEASE)
                raise
            finally:
                self._queued.discard(task)
        try:
            if consumer.closing:
                consumer.settle(m.receipt, RELEASE)
            elif waits and not consumer.holds(m.receipt):
                pass  # it was lost meanwhile
            elif await self.attempts.make(consumer, m, part, task):
                consumer.settle(m.receipt)
        finally:
            if slots is not None:
                slots.release()


async def _ignore(m: Message[Any]) -> None:
    """For events that no handler is for."""


def current_task() -> asyncio.Task[Any]:
    """The task that asks."""
    task = asyncio.current_task()
    assert task is not None
    return task


def age(at: float | None) -> float | None:
    """Seconds since a time of the monotonic clock."""
    return None if at is None else time.monotonic() - at
