"""What a client has to be able to do to be measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from bench._peers import PAYLOAD

Settings = Mapping[str, Any]

FIELDS: dict[str, Any] = json.loads(PAYLOAD)


class Counter:
    """The trivial handler: it counts, and at the end, or when time is over, it stops the worker.

    The clock runs from the end of the warm-up to the last message. Both are at whole thousands: were they at
    different places in a batch of the worker's, a part of a batch would be had for nothing.
    """

    def __init__(self, wanted: int, seconds: float) -> None:
        self._warm_up = max(1, wanted // 10_000) * 1000
        self.count = 0
        self.begun = self.ended = 0.0
        self._wanted, self._seconds = wanted, seconds
        self.stop: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        """One message was handled."""
        self.count += 1
        if self.ended:
            return
        if self.count == self._warm_up:
            self.begun = time.monotonic()
        elif self.begun and (self.count >= self._wanted or time.monotonic() - self.begun > self._seconds):
            self.ended = time.monotonic()
            self.rate = (self.count - self._warm_up) / (self.ended - self.begun)
            self.stop()


class Watch:
    """The handler that takes times: how long ago each message says it was sent."""

    def __init__(self, wanted: int, ready: Callable[[], None]) -> None:
        self.seen: list[float] = []
        self._wanted = wanted
        self._ready: Callable[[], None] | None = ready
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, fields: Mapping[str, Any]) -> None:
        """One message came. Those without a time are sent until the first has come."""
        if self._ready:
            self._ready()
            self._ready = None
        if fields["sent"]:
            self.seen.append((time.monotonic_ns() - fields["sent"]) / 1e9)
            if len(self.seen) == self._wanted:
                self.stop()


class Producer(Protocol):
    """A client that sends."""

    async def send(self, fields: Mapping[str, Any]) -> None:
        """Send one message."""

    async def send_batch(self, count: int) -> None:
        """Send the standard message so many times, in one call."""


class System(Protocol):
    """A client library. Settings are its own: what makes it fast."""

    async def install(self, dsn: str) -> None:
        """Put what it needs into the database."""

    def producer(self, dsn: str, settings: Settings) -> AbstractAsyncContextManager[Producer]:
        """Connect a client that sends."""

    async def work(self, dsn: str, settings: Settings, handler: Counter) -> None:
        """Run a worker until the handler stops it."""

    async def watch(self, dsn: str, settings: Settings, handler: Watch) -> None:
        """The same with the other handler, set up for short ways instead of many messages."""
