"""Where a consumer gets its messages from."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from postbus.client._async._bus import AsyncBus
from postbus.client._async._delivery import AsyncDelivery

T = TypeVar("T")


class AsyncSource(Protocol[T]):
    """Where messages come from: a queue, or a group of a stream."""

    bus: AsyncBus

    @property
    def channel(self) -> str:
        """What to listen to: the name of the queue or stream."""
        ...

    @property
    def label(self) -> str:
        """What it is called in the log."""
        ...

    async def take(self, max: int, lease: float | None) -> list[tuple[Any, ...]]:
        """Take messages on a lease, as rows."""
        ...

    def deliver(self, row: tuple[Any, ...], consumer: Any) -> AsyncDelivery[T]:
        """A row as a message."""
        ...

    async def default_lease(self) -> float:
        """The lease of the queue or group, in seconds."""
        ...

    async def ordering(self) -> str:
        """Of the group; ``none`` for queues."""
        ...

    async def next_due(self) -> float | None:
        """In how many seconds the next message is due, as far as is known."""
        ...
