"""An asynchronous object that is used like a blocking one, so that one test serves `Bus` and `AsyncBus`.

Its event loop runs in a thread of its own: background tasks go on while the test does something else, as the
threads of the blocking client do.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

_END = object()


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="driven")
        self._thread.start()

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, or coroutine function, on the loop; returns its result."""

        async def call() -> Any:
            result = function(*args, **kwargs)
            try:
                return await result if inspect.isawaitable(result) else result
            except StopAsyncIteration:
                return _END

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Driven:
    """What stands for an asynchronous object."""

    def __init__(self, loop: Loop, thing: Any) -> None:
        self._loop = loop
        self._thing = thing

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._thing, name)
        if not callable(value):
            return wrapped(self._loop, value)
        return lambda *args, **kwargs: self._run(value, *args, **kwargs)

    def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        plain = [bare(a) for a in args]
        named = {name: bare(a) for name, a in kwargs.items()}
        return wrapped(self._loop, self._loop.run(function, *plain, **named))

    def __enter__(self) -> Any:
        return self._run(self._thing.__aenter__)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> Any:
        return self._run(self._thing.__aexit__, kind, exc, trace)

    def __iter__(self) -> Any:
        return wrapped(self._loop, self._loop.run(self._thing.__aiter__))

    def __next__(self) -> Any:
        found = self._loop.run(self._thing.__anext__)
        if found is _END:
            raise StopIteration
        return wrapped(self._loop, found)

    def __len__(self) -> int:
        return len(self._thing)

    def __getitem__(self, index: int) -> Any:
        return wrapped(self._loop, self._thing[index])

    def __bool__(self) -> bool:
        return bool(self._thing)

    def __repr__(self) -> str:
        return repr(self._thing)


def wrapped(loop: Loop, value: Any) -> Any:
    """Results that are asynchronous themselves are wrapped too."""
    if isinstance(value, list):
        return [wrapped(loop, each) for each in value]
    module = type(value).__module__
    if module.startswith(("postbus.client._async", "psycopg", "contextlib")) and not isinstance(
        value, BaseException
    ):
        return Driven(loop, value)
    return value


def bare(value: Any) -> Any:
    """The thing itself."""
    if isinstance(value, list):
        return [bare(each) for each in value]
    return value._thing if isinstance(value, Driven) else value


@contextmanager
def driven(make: Any) -> Iterator[Any]:
    """What `make` makes, entered as an asynchronous context manager and wrapped."""
    loop = Loop()
    try:
        with Driven(loop, loop.run(make)) as thing:
            yield thing
    finally:
        loop.close()
