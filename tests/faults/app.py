"""A worker process that exists to be killed, stopped and signalled.

python -m tests.faults.app '{"dsn": ..., "record": ..., "queues": ["jobs"], ...}'
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from postbus import AsyncBus, Message, Worker
from tests.faults.record import Record

POINTS = ("before fetch", "after fetch", "in the handler", "before the ack", "after the ack")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str) -> None:
    """Arrange for the end of this process at one point of the life of a message."""
    fetch = AsyncBus.fetch

    async def fetching(self: AsyncBus, query: str, *args: Any) -> list[tuple[Any, ...]]:
        takes = "postbus.receive(" in query or "postbus.consume(" in query
        acks = "postbus.ack(" in query
        if (takes and point == "before fetch") or (acks and point == "before the ack"):
            die()
        rows = await fetch(self, query, *args)
        if (takes and rows and point == "after fetch") or (acks and point == "after the ack"):
            die()
        return rows

    AsyncBus.fetch = fetching  # type: ignore


def made(config: dict[str, Any]) -> Worker:
    """A worker that writes down what it does."""
    record = Record(Path(config["record"]))
    point = config.get("die_at")
    if point is not None:
        die_at(point)
    work = float(config.get("work", 0))
    worker = Worker(
        config["dsn"],
        name=config.get("name"),
        grace=config.get("grace", 20),
        maintain=config.get("maintain", False),
    )
    options: dict[str, Any] = {k: config[k] for k in ("concurrency", "prefetch", "lease") if k in config}

    async def handle(m: Message[Any]) -> None:
        record.note(m.source, m.payload, m.key, m.attempt, "begin")
        if point == "in the handler":
            die()
        if work:
            await asyncio.sleep(work)
        record.note(m.source, m.payload, m.key, m.attempt, "end")

    def transact(m: Message[Any], conn: Any) -> None:
        record.note(m.source, m.payload, m.key, m.attempt, "begin")
        if work:
            conn.execute("select pg_sleep(%s)", (work,))
        conn.execute("insert into effect (source, n) values (%s, %s)", (m.source, m.payload))
        record.note(m.source, m.payload, m.key, m.attempt, "end")

    function: Any = transact if config.get("transactional") else handle
    options["transactional"] = bool(config.get("transactional"))
    for name in config.get("queues", ()):
        worker.queue(name, **options)(function)
    for name in config.get("streams", ()):
        worker.stream(name, group="g", **{"prefetch": 20, **options})(function)
    return worker


if __name__ == "__main__":
    made(json.loads(sys.argv[1])).main()
