"""One turn of one client: ``python -m bench._clients SYSTEM VERB JSON``; the answer is a line of JSON."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import sys
import time
from typing import Any

from bench._clients._system import FIELDS, Counter, System, Watch


async def _install(system: System, job: dict[str, Any]) -> None:
    await system.install(job["dsn"])


async def _fill(system: System, job: dict[str, Any]) -> None:
    """A backlog for a worker."""
    async with system.producer(job["dsn"], job["settings"]) as producer:
        for done in range(0, job["messages"], job["batch"]):
            await producer.send_batch(min(job["batch"], job["messages"] - done))


async def _produce(system: System, job: dict[str, Any]) -> float:
    """Messages a second of one producer, in batches."""
    batch, calls = job["batch"], 0
    async with system.producer(job["dsn"], job["settings"]) as producer:
        for _ in range(6):  # then psycopg has prepared it
            await producer.send_batch(batch)
        begun = time.monotonic()
        while time.monotonic() - begun < job["seconds"]:
            await producer.send_batch(batch)
            calls += 1
        return float(batch * calls / (time.monotonic() - begun))


async def _work(system: System, job: dict[str, Any]) -> dict[str, float]:
    """Messages a second of one worker, and how many it handled in all."""
    handler = Counter(job["messages"], job["seconds"])
    await system.work(job["dsn"], job["settings"], handler)
    if not handler.ended:
        raise RuntimeError(f"the worker ended after {handler.count} messages")
    return {"rate": handler.rate, "handled": handler.count}


async def _watch(system: System, job: dict[str, Any]) -> list[float]:
    """Latencies in seconds."""
    handler = Watch(job["messages"], ready=lambda: print("ready", flush=True))
    await system.watch(job["dsn"], job["settings"], handler)
    return handler.seen


async def _pace(system: System, job: dict[str, Any]) -> int:
    """Send without a time until told to go on, then at a pace with the time of sending."""
    told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    async with system.producer(job["dsn"], job["settings"]) as producer:
        while not told.done():
            await producer.send({**FIELDS, "sent": 0})
            await asyncio.wait([told], timeout=0.1)
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        for i in range(job["messages"]):
            await asyncio.sleep(max(0.0, begun + i / job["pace"] - time.monotonic()))
            await producer.send({**FIELDS, "sent": time.monotonic_ns()})
    return int(job["messages"])


_VERBS = {
    "install": _install,
    "fill": _fill,
    "produce": _produce,
    "work": _work,
    "watch": _watch,
    "pace": _pace,
}


def main(name: str, verb: str, text: str) -> None:
    """Do the turn on the loop that the settings name."""
    logging.basicConfig(level=logging.WARNING)
    job = json.loads(text)
    system: System = importlib.import_module(f"bench._clients.{name}").SYSTEM
    if job["settings"].get("loop") == "uvloop":
        import uvloop

        result = uvloop.run(_VERBS[verb](system, job))
    else:
        result = asyncio.run(_VERBS[verb](system, job))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
