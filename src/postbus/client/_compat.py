"""The little that asyncio and threads do not share, under names that the generator of the sync twin knows.

The left one of each pair is used in ``_async``, the right one in ``_sync``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

log = logging.getLogger("postbus")

ALock: TypeAlias = asyncio.Lock
Lock: TypeAlias = threading.Lock


class AEvent(asyncio.Event):
    """An event that another thread can set, and that can be waited for with an end."""

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    def set_from_thread(self) -> None:
        """Set it, from any thread, also from ``__del__``."""
        self._home.call_soon_threadsafe(self.set)

    async def wait_for(self, seconds: float | None) -> bool:
        """Wait until it is set, at most so long; returns whether it is."""
        if self.is_set():
            return True
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except TimeoutError:
            return False


class Event:
    """The same for threads.

    Unlike `threading.Event` it can be set by a ``__del__`` that runs in the middle of another call of the
    same thread: the garbage collector may come at any time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._is_set = False

    def set(self) -> None:
        """Set it, from any thread."""
        if self._is_set:
            return
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def set_from_thread(self) -> None:
        """Set it, from any thread, also from ``__del__``."""
        self.set()

    def clear(self) -> None:
        """Unset it."""
        self._is_set = False

    def wait_for(self, seconds: float | None) -> bool:
        """Wait until it is set, at most so long; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, seconds)


def aspawn(work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `work` in the background."""

    async def run() -> None:
        await work()

    return asyncio.get_running_loop().create_task(run(), name=name)


def spawn(work: Callable[[], None], name: str) -> threading.Thread:
    """Run `work` in the background."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


async def ajoin(tasks: list[Any], seconds: float) -> bool:
    """Wait for what `aspawn` started; returns whether all have ended."""
    # Not gather: if we are cancelled, they are not.
    _, late = await asyncio.wait(tasks, timeout=seconds)
    return not late


def join(threads: list[Any], seconds: float) -> bool:
    """Wait for what `spawn` started; returns whether all have ended."""
    end = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def acancel(tasks: list[Any]) -> None:
    """End what does not end by itself."""
    for task in tasks:
        task.cancel()


def cancel(threads: list[Any]) -> None:
    """Threads cannot be ended: they find out when the pool is closed."""


async def arun(work: Callable[[], T]) -> T:
    """Call something that blocks."""
    return await asyncio.to_thread(work)


def run(work: Callable[[], T]) -> T:
    """Call something that blocks."""
    return work()


async def asleep(seconds: float) -> None:
    """Sleep."""
    await asyncio.sleep(seconds)


def sleep(seconds: float) -> None:
    """Sleep."""
    threading.Event().wait(seconds)


def alive(task: asyncio.Task[None] | threading.Thread) -> bool:
    """Whether a task or thread still runs."""
    return task.is_alive() if isinstance(task, threading.Thread) else not task.done()
