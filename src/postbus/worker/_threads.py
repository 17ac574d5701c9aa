"""Where plain functions run.

Not the thread pool of the standard library: its threads are waited for when the process ends, and one that
hangs takes a place away from the others. Here a call never waits for a thread, and a thread that hangs is
left behind. How many run at a time is the business of whoever calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger("postbus")

Job = Callable[[], None]


class Threads:
    """Daemon threads, made as they are needed and used again.

    Attributes:
        busy: how many are at work, those included that nobody waits for any more.
    """

    def __init__(self) -> None:
        self.busy = 0
        self._idle = 0
        self._closed = False
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread, with the context variables of the caller.

        If the caller is cancelled the function goes on by itself, and nobody hears of what it returns.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            result, problem = None, None
            try:
                result = context.run(function, *args)
            except Exception as exc:
                # A future does not take this one.
                problem = RuntimeError("StopIteration") if isinstance(exc, StopIteration) else exc
            except BaseException as exc:
                problem = RuntimeError(f"{type(exc).__qualname__}: {exc}")
                problem.__cause__ = exc
            with suppress(RuntimeError):  # the loop has been closed: the worker has ended
                loop.call_soon_threadsafe(_settle, future, result, problem)

        self._submit(job)
        return await future

    def close(self) -> None:
        """Let the threads end that have nothing to do, and the others when they are done."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._jobs.put(None)

    def _submit(self, job: Job) -> None:
        with self._lock:
            self.busy += 1
            if self._idle > 0:
                self._idle -= 1
                self._jobs.put(job)
                return
        threading.Thread(target=self._work, args=(job,), name="postbus-handler", daemon=True).start()

    def _work(self, job: Job | None) -> None:
        while job is not None:
            job()
            del job  # the message need not live until the next one
            with self._lock:
                self.busy -= 1
                if self._closed:
                    return
                self._idle += 1
            job = self._jobs.get()


def _settle(future: asyncio.Future[Any], result: Any, problem: Exception | None) -> None:
    if future.done():
        log.debug("a handler ended after it was given up: %s", problem or "it was successful")
    elif problem is not None:
        future.set_exception(problem)
    else:
        future.set_result(result)
