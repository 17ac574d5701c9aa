# Generated from ../_async/_delivery.py by tools/gen_sync.py ("make format"): edit that one.
"""A message on a lease, with the verbs that end it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from postbus.client._message import Message

if TYPE_CHECKING:
    from postbus.client._sync._bus import Bus

T = TypeVar("T")


class Delivery(Message[T], frozen=True, kw_only=True, eq=False):
    """A message that was handed out to us on a lease.

    Leaving the body of the loop acks it and an exception nacks it; the verbs here are for when that is not
    what is wanted. They are carried out before they return. With `conn` they become part of the transaction
    on that connection: the message is finished if and when it commits. If it does not commit, the message
    comes again when the lease ends.

    Example:
        >>> for m in queue:  # doctest: +SKIP
        ...     with pool.connection() as conn, conn.transaction():
        ...         conn.execute("insert into sent values (%s)", (m.id,))
        ...         m.ack(conn=conn)
    """

    _bus: Any = None
    _consumer: Any = None

    def ack(self, *, conn: object | None = None) -> None:
        """Finish it for good.

        Raises:
            LeaseLost: it went to somebody else meanwhile, or was finished before.
        """
        self._the_bus.ack(self, conn=conn)

    def nack(
        self,
        *,
        delay: float | None = None,
        reason: str | None = None,
        state: Any = None,
        conn: object | None = None,
    ) -> None:
        """Give it back: it comes again after `delay` seconds (default: the backoff of the queue or group).

        In a group with an order, what came with it and has to stay behind it goes back too.

        Args:
            delay: seconds.
            reason: kept with it, and shown in the dead letters.
            state: what the next attempt finds in its `state` (queues).
            conn: the transaction to do it in.
        """
        self._the_bus.nack(self, delay=delay, reason=reason, state=state, conn=conn)

    def dead_letter(self, reason: str | None = None, *, conn: object | None = None) -> None:
        """Give it up: it goes to the dead letters now."""
        self._the_bus.dead_letter(self, reason=reason, conn=conn)

    def release(self, *, conn: object | None = None) -> None:
        """Give it back as if it had never been taken: it is due at once, and the attempt does not count."""
        self._the_bus.release(self, conn=conn)

    def extend(
        self, lease: float | None = None, *, state: Any = None, conn: object | None = None
    ) -> datetime:
        """Keep it for at least `lease` more seconds; returns when the lease then ends.

        While a loop or a worker has it in hand this happens by itself.
        """
        return self._the_bus.extend(self, lease=lease, state=state, conn=conn)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.source!r}, attempt {self.attempt}>"

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()  # only the data can go to another process

    @property
    def _the_bus(self) -> Bus:
        bus: Bus = self._bus
        return bus
