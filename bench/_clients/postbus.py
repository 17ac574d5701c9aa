"""Postbus: AsyncBus and Worker, on a queue or a stream; settings kind, concurrency, prefetch, loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from bench._clients._system import FIELDS, Counter, Settings, Watch
from postbus.client import AsyncBus, AsyncQueue, AsyncStream, Message
from postbus.worker import Worker


class _QueueProducer:
    def __init__(self, queue: AsyncQueue[Any]) -> None:
        self._queue = queue

    async def send(self, fields: Mapping[str, Any]) -> None:
        await self._queue.send(fields)

    async def send_batch(self, count: int) -> None:
        await self._queue.send_batch([FIELDS] * count)


class _StreamProducer:
    def __init__(self, stream: AsyncStream[Any]) -> None:
        self._stream = stream

    async def send(self, fields: Mapping[str, Any]) -> None:
        await self._stream.publish(fields)

    async def send_batch(self, count: int) -> None:
        await self._stream.publish_batch([FIELDS] * count)


class Postbus:
    """One worker with one handler."""

    async def install(self, dsn: str) -> None:
        """The engine is there already."""

    @asynccontextmanager
    async def producer(self, dsn: str, settings: Settings) -> AsyncIterator[_QueueProducer | _StreamProducer]:
        """Connect a client that sends."""
        async with AsyncBus(dsn) as bus:
            if settings["kind"] == "queue":
                yield _QueueProducer(await bus.queue("bench", create=True))
            else:
                yield _StreamProducer(await bus.stream("events", create=True))

    async def work(self, dsn: str, settings: Settings, handler: Counter) -> None:
        """Run until the handler stops it."""
        worker = Worker(dsn=dsn)
        handler.stop = worker.stop

        async def handle(m: Message[Any]) -> None:
            handler()

        self._subscribe(worker, settings)(handle)
        await worker.run()

    async def watch(self, dsn: str, settings: Settings, handler: Watch) -> None:
        """Run until the handler stops it."""
        worker = Worker(dsn=dsn)
        handler.stop = worker.stop

        async def handle(m: Message[Any]) -> None:
            handler(m.payload)

        self._subscribe(worker, settings)(handle)
        await worker.run()

    def _subscribe(self, worker: Worker, settings: Settings) -> Any:
        wide = {"concurrency": settings["concurrency"], "prefetch": settings["prefetch"]}
        if settings["kind"] == "queue":
            return worker.queue("bench", **wide)
        return worker.stream("events", group="bench", **wide)


SYSTEM = Postbus()
