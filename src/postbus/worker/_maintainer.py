"""Upkeep by one worker per database: whoever has the lock does it, and the others wait for it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import Any

import psycopg

from postbus import _telemetry
from postbus.client._async._bus import AsyncBus

log = logging.getLogger("postbus")

LOCK = 1886351996  # see 00_schema.sql for the others
EVERY = 1.0  # seconds between two runs of the one that is elected
CANDIDATE_EVERY = 3.0  # and between two tries of the others
DENIED_EVERY = 300.0  # where the role may not do it
METRICS_EVERY = 10.0

_PROBLEMS = "select m.object, m.step, m.problem from postbus.maintain() m where m.problem is not null"
# Behind a pooler a lock of a session would stay with the pooler: the lock is held for one run. It has to be
# one statement, or upkeep would think that it runs inside of somebody's transaction.
_POOLED = """
    select p.* from (select pg_try_advisory_xact_lock(%s) as got offset 0) l left join lateral (
      select m.object, m.step, m.problem from postbus.maintain() m
      where l.got and m.problem is not null offset 0
    ) p on true where l.got"""


class Maintainer:
    """Calls ``postbus.maintain()`` once a second, if no other worker does."""

    def __init__(self, bus: AsyncBus) -> None:
        self._bus = bus
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._gauges = _telemetry.Gauges()
        self._measured_at = 0.0
        self._told: str | None = None
        self.elected = False

    def start(self) -> None:
        """Stand for election."""
        self._task = asyncio.create_task(self._run(), name="postbus-maintainer")

    async def stop(self) -> None:
        """Hand over."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5)

    async def _run(self) -> None:
        while not self._stopping:
            pause = CANDIDATE_EVERY
            elected = False
            try:
                async with self._bus.pool.connection() as conn:
                    elected = await self._stand(conn)
            except psycopg.errors.InsufficientPrivilege as exc:
                self._tell(f"this role may not do the upkeep: {exc}")
                pause = DENIED_EVERY
            except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
                log.debug("upkeep: %s", exc)
            except psycopg.Error as exc:
                self._tell(f"upkeep: {exc}")
            finally:
                self.elected = elected
                if not elected:
                    self._gauges.clear()
            pause = EVERY if elected else pause * random.uniform(0.7, 1.3)  # noqa: S311 - not a secret
            await asyncio.sleep(pause)

    def _tell(self, what: str) -> None:
        """Say it once."""
        if what != self._told:
            log.warning("%s", what.strip())
            self._told = what

    async def _stand(self, conn: psycopg.AsyncConnection[Any]) -> bool:
        """Do the upkeep if the lock is to be had, for as long as this connection lasts.

        Behind a pooler that is one run; returns whether it was done.
        """
        if conn.prepare_threshold is None:
            rows = await (await conn.execute(_POOLED, (LOCK,), prepare=False)).fetchall()
            await self._report(conn, rows)
            return bool(rows)
        row = await (await conn.execute("select pg_try_advisory_lock(%s)", (LOCK,))).fetchone()
        if row is None or not row[0]:
            return False
        self.elected = True
        try:
            while not self._stopping:
                await self._report(conn, await (await conn.execute(_PROBLEMS)).fetchall())
                await asyncio.sleep(EVERY)
        finally:
            with suppress(psycopg.Error):
                await conn.execute("select pg_advisory_unlock(%s)", (LOCK,))
        return False

    async def _report(self, conn: psycopg.AsyncConnection[Any], problems: list[tuple[Any, ...]]) -> None:
        for where, step, problem in problems:
            if problem is not None:
                log.warning("upkeep of %s, %s: %s", where, step, problem)
        if _telemetry.metering() and time.monotonic() - self._measured_at > METRICS_EVERY:
            self._measured_at = time.monotonic()
            with suppress(psycopg.errors.InsufficientPrivilege):
                cursor = await conn.execute("select name, type, value, labels from postbus.metrics()")
                self._gauges.show(await cursor.fetchall())
