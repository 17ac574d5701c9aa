"""pgqueuer: QueueManager, enqueue with lists; settings driver, batch, loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries
from psycopg.conninfo import conninfo_to_dict

from bench._clients._system import Counter, Settings, Watch
from bench._peers import PAYLOAD

_PAYLOAD = PAYLOAD.encode()
_POOL_SIZE = 4


@asynccontextmanager
async def _queries(dsn: str, settings: Settings) -> AsyncIterator[Queries]:
    """Connect with the driver of the settings."""
    driver = settings.get("driver", "asyncpg")
    if driver == "psycopg":
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            yield Queries.from_psycopg_connection(conn)
        return
    given = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    parts = {"database" if key == "dbname" else key: value for key, value in given.items()}
    if driver == "asyncpg pool":
        async with asyncpg.create_pool(**parts, min_size=_POOL_SIZE, max_size=_POOL_SIZE) as pool:
            yield Queries.from_asyncpg_pool(pool)
        return
    conn = await asyncpg.connect(**parts)
    try:
        yield Queries.from_asyncpg_connection(conn)
    finally:
        await conn.close()


class _Producer:
    def __init__(self, made: Queries) -> None:
        self._queries = made

    async def send(self, fields: Mapping[str, Any]) -> None:
        await self._queries.enqueue("bench", json.dumps(fields).encode())

    async def send_batch(self, count: int) -> None:
        await self._queries.enqueue(["bench"] * count, [_PAYLOAD] * count, [0] * count)


class Pgqueuer:
    """One queue manager with one entrypoint."""

    async def install(self, dsn: str) -> None:
        """Make its tables."""
        async with _queries(dsn, {}) as made:
            await made.install()

    @asynccontextmanager
    async def producer(self, dsn: str, settings: Settings) -> AsyncIterator[_Producer]:
        """Connect a client that sends."""
        async with _queries(dsn, settings) as made:
            yield _Producer(made)

    async def work(self, dsn: str, settings: Settings, handler: Counter) -> None:
        """Run until the handler stops it."""
        async with _queries(dsn, settings) as made:
            manager = QueueManager(made)
            handler.stop = manager.shutdown.set

            @manager.entrypoint("bench")
            async def handle(job: Job) -> None:
                handler()

            await manager.run(batch_size=settings["batch"])

    async def watch(self, dsn: str, settings: Settings, handler: Watch) -> None:
        """Run until the handler stops it."""
        async with _queries(dsn, settings) as made:
            manager = QueueManager(made)
            handler.stop = manager.shutdown.set

            @manager.entrypoint("bench")
            async def handle(job: Job) -> None:
                handler(json.loads(job.payload or b"{}"))

            await manager.run()


SYSTEM = Pgqueuer()
