"""procrastinate: one worker, several jobs at a time, batch_defer; settings concurrency, delete, loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from procrastinate import App, PsycopgConnector
from procrastinate.types import JSONDict

from bench._clients._system import FIELDS, Counter, Settings, Watch

_JOB: JSONDict = {"payload": FIELDS}


def _app(dsn: str, settings: Settings) -> App:
    # Each running job ends with a query: connections for some of them, one for listening.
    size = min(20, settings.get("concurrency", 1) + 2)
    return App(connector=PsycopgConnector(conninfo=dsn, min_size=2, max_size=size))


class _Producer:
    def __init__(self, app: App) -> None:
        @app.task(name="bench", queue="bench")
        async def handle(payload: dict[str, Any]) -> None: ...

        self._task = handle

    async def send(self, fields: Mapping[str, Any]) -> None:
        await self._task.defer_async(payload=dict(fields))

    async def send_batch(self, count: int) -> None:
        await self._task.batch_defer_async(*[_JOB] * count)


class Procrastinate:
    """One app with one task."""

    async def install(self, dsn: str) -> None:
        """Make its tables."""
        app = _app(dsn, {})
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def producer(self, dsn: str, settings: Settings) -> AsyncIterator[_Producer]:
        """Connect a client that sends."""
        app = _app(dsn, settings)
        async with app.open_async():
            yield _Producer(app)

    async def work(self, dsn: str, settings: Settings, handler: Counter) -> None:
        """Run until the handler stops it."""
        await self._run(dsn, settings, handler, lambda payload: handler())

    async def watch(self, dsn: str, settings: Settings, handler: Watch) -> None:
        """Run until the handler stops it."""
        await self._run(dsn, settings, handler, handler)

    async def _run(self, dsn: str, settings: Settings, handler: Any, call: Any) -> None:
        app = _app(dsn, settings)

        @app.task(name="bench", queue="bench")
        async def handle(payload: dict[str, Any]) -> None:
            call(payload)

        async with app.open_async():
            worker = app.run_worker_async(
                queues=["bench"],
                concurrency=settings["concurrency"],
                delete_jobs=settings["delete"],
                install_signal_handlers=False,
            )
            running = asyncio.create_task(worker)
            handler.stop = running.cancel  # it ends what it has begun
            with suppress(asyncio.CancelledError):
                await running


SYSTEM = Procrastinate()
