# Generated from ../_async/_source.py by tools/gen_sync.py ("make format"): edit that one.
"""Where a consumer gets its messages from."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from postbus.client._sync._bus import Bus
from postbus.client._sync._delivery import Delivery

T = TypeVar("T")


class Source(Protocol[T]):
    """Where messages come from: a queue, or a group of a stream."""

    bus: Bus

    @property
    def channel(self) -> str:
        """What to listen to: the name of the queue or stream."""
        ...

    @property
    def label(self) -> str:
        """What it is called in the log."""
        ...

    def take(self, max: int, lease: float | None) -> list[tuple[Any, ...]]:
        """Take messages on a lease, as rows."""
        ...

    def deliver(self, row: tuple[Any, ...], consumer: Any) -> Delivery[T]:
        """A row as a message."""
        ...

    def default_lease(self) -> float:
        """The lease of the queue or group, in seconds."""
        ...

    def ordering(self) -> str:
        """Of the group; ``none`` for queues."""
        ...

    def next_due(self) -> float | None:
        """In how many seconds the next message is due, as far as is known."""
        ...
