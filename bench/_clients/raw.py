"""The SQL of Postbus without its client: what the calls that send cost with psycopg alone; settings kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from bench._clients._system import Counter, Settings, Watch
from bench._peers import PAYLOAD

# Arrays go in binary (%b): as text they take psycopg 30 times as long, which is longer than all the rest.
_BATCH = {
    "queue": "select postbus.send_batch('bench', %b::text[])",
    "stream": "select postbus.publish_batch('events', %b::text[])",
}


class _Producer:
    """Its payloads are text already."""

    def __init__(self, conn: psycopg.AsyncConnection[Any], statement: str) -> None:
        self._conn, self._statement = conn, statement.encode()

    async def send(self, fields: Mapping[str, Any]) -> None:
        raise NotImplementedError

    async def send_batch(self, count: int) -> None:
        cur = await self._conn.execute(self._statement, [[PAYLOAD] * count])
        await cur.fetchone()


class Raw:
    """Producers only."""

    async def install(self, dsn: str) -> None:
        """The engine is there already."""

    @asynccontextmanager
    async def producer(self, dsn: str, settings: Settings) -> AsyncIterator[_Producer]:
        """Connect."""
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            yield _Producer(conn, _BATCH[settings["kind"]])

    async def work(self, dsn: str, settings: Settings, handler: Counter) -> None:
        """Not measured."""
        raise NotImplementedError

    async def watch(self, dsn: str, settings: Settings, handler: Watch) -> None:
        """Not measured."""
        raise NotImplementedError


SYSTEM = Raw()
