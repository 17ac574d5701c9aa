"""Handlers in processes of their own, for work that keeps a processor busy.

Each process does one message at a time. One that dies, or takes too long and is killed, takes nothing else
with it; the next message gets a new one.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import pickle
import signal
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from postbus.errors import BadArgument, PostbusError
from postbus.worker._threads import Threads

_spawn = multiprocessing.get_context("spawn")


class ProcessDied(PostbusError):  # noqa: N818 - the names of the domain
    """The process of a handler ended before the handler did."""


class _Child:
    """A process, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, theirs = _spawn.Pipe()
        # Daemon: it does not outlive an orderly end of this process; after a disorderly one its pipe ends.
        self.process = _spawn.Process(target=_serve, args=(theirs,), name="postbus-handler", daemon=True)
        self.process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], m: Any) -> None:
        """Run the handler there. Blocks."""
        try:
            self.pipe.send((function, m))
            done, problem = self.pipe.recv()
        except (EOFError, OSError) as exc:
            self.process.join(5)
            raise ProcessDied(
                f"the process of the handler died with exit code {self.process.exitcode}"
            ) from exc
        if not done:
            raise problem

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()


class Processes:
    """The processes of one worker."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        weakref.finalize(self, _kill, self._all)  # also at the end of the interpreter

    async def run(self, function: Callable[..., Any], m: Any) -> None:
        """Run a handler in a process. If the caller is cancelled the process is killed."""
        child = self._idle.pop() if self._idle else await self._threads.run(_Child)
        self._all.add(child)
        try:
            await self._threads.run(child.call, function, m)
        except (asyncio.CancelledError, ProcessDied):
            self._all.discard(child)
            await self._bury(child)
            raise
        except Exception:
            self._idle.append(child)
            raise
        self._idle.append(child)

    async def _bury(self, child: _Child) -> None:
        child.kill()
        await asyncio.shield(asyncio.ensure_future(self._threads.run(child.process.join, 5)))

    def close(self) -> None:
        """Kill all of them."""
        _kill(self._all)
        self._idle.clear()


def check(function: Callable[..., Any], what: str) -> None:
    """Find out whether another process can find the function.

    Raises:
        BadArgument: it cannot.
    """
    try:
        pickle.dumps(function)
    except Exception as exc:
        raise BadArgument(
            f"{what} cannot be sent to another process: {exc}",
            hint="Define it at the top level of a module that can be imported.",
        ) from exc


def _kill(children: set[_Child]) -> None:
    while children:
        children.pop().kill()


def _serve(pipe: Connection) -> None:
    """What a process does."""
    # The worker decides when it ends: Ctrl-C and systemd signal the whole group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return  # the worker has ended
        try:
            function, m = pickle.loads(data)  # noqa: S301 - from our own worker
            called(function, m)
            answer: tuple[bool, BaseException | None] = (True, None)
        except BaseException as exc:
            answer = (False, _portable(exc))
        try:
            pipe.send(answer)
        except OSError:
            return


def called(function: Callable[..., Any], *args: Any) -> None:
    """Call a plain function, and make sure that it has done its work when it returns.

    Raises:
        TypeError: it returned a coroutine or a generator: nothing was done.
    """
    result = function(*args)
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"the handler returned a {type(result).__name__}, which has not run: use async def")


def _portable(exc: BaseException) -> BaseException:
    """An exception that survives the pipe, with its traceback as a note."""
    trace = "".join(traceback.format_exception(exc))
    found: Any = None
    try:
        found = pickle.loads(pickle.dumps(exc))  # noqa: S301 - our own
    except Exception:
        found = None
    if not isinstance(found, Exception) or str(found) != str(exc):
        found = RuntimeError(f"{type(exc).__qualname__}: {exc}")
    found.add_note(trace)
    kept: BaseException = found
    return kept
