"""Waiting for what happens in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 30.0


def eventually(check: Callable[[], Any], what: str, within: float = PATIENCE) -> Any:
    """Wait until something is so, and return what the check returned."""
    until = time.monotonic() + within
    while not (found := check()):
        assert time.monotonic() < until, f"not in time: {what}"
        time.sleep(0.005)
    return found
