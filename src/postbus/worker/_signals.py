"""Ending by signals: the first one drains, the second one leaves at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("postbus")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MARGIN = 15.0  # seconds after the grace, for the database to be told


class Signals:
    """While it is open, signals call `first`, and then `last` and the end of the process.

    Not by way of the loop: a handler that keeps the loop busy must not keep the second signal waiting.

    Args:
        first: begins to drain. It must be safe to call at any point of the main thread.
        last: called just before the process ends.
        grace: seconds after which draining should be over. The process is ended if it goes on for longer.
    """

    def __init__(self, first: Callable[[int], None], last: Callable[[], None], grace: float) -> None:
        self._first = first
        self._last = last
        self._grace = grace
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}
        self._begun = threading.Event()
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="postbus-watchdog", daemon=True).start()
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._caught)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._begun.set()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            self._begun.set()
            self._first(number)
            return
        # Written without the logging module, which may be just at work. What was taken comes again when its
        # lease ends.
        self._leave(128 + number, b"postbus: second signal, leaving at once\n")

    def _watch(self) -> None:
        """A handler that can neither be waited for nor cancelled does not keep the process alive."""
        self._begun.wait()
        if not self._over.wait(min(self._grace + MARGIN, threading.TIMEOUT_MAX)):
            self._leave(1, b"postbus: handlers do not end, leaving without them\n")

    def _leave(self, code: int, text: bytes) -> None:
        try:
            os.write(2, text)
            self._last()
        finally:
            os._exit(code)
