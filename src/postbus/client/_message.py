"""What a consumer gets: a frozen, typed message."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from postbus.serializers import Codec

T = TypeVar("T")


class Message(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One message of a queue or a stream. The data only: it can be pickled, logged and handed on.

    Example:
        >>> m = Message(source="emails", id=1, payload={"to": "someone@example.com"})
        >>> m.payload["to"], m.attempt
        ('someone@example.com', 1)

    Attributes:
        source: the name of the queue or stream it came from.
        id: unique in that queue or stream.
        payload: what was sent, decoded into `T`.
        type: the sender's word for what it is.
        key: messages of one key belong together, and may be served in order.
        headers: what travels beside the payload.
        created_at: when it was sent, by the clock of the database.
        attempt: how often it has been delivered, this time included.
        group: the group that consumes, for streams.
        priority: for queues, 0 to 9.
        state: what the attempt before left behind (queues).
        receipt: finishes this message.
        batch: finishes all that came with it (streams).
    """

    source: str
    id: int
    payload: T
    type: str = "default"
    key: str | None = None
    headers: dict[str, Any] = {}
    created_at: datetime | None = None
    attempt: int = 1
    group: str | None = None
    priority: int = 0
    state: Any = None
    receipt: str = ""
    batch: str | None = None

    def plain(self) -> Message[T]:
        """The data alone, without the verbs of a delivery: for other threads and processes."""
        if type(self) is Message:
            return self
        return Message(**{name: getattr(self, name) for name in Message.__struct_fields__})


class DeadLetter(Message[T], frozen=True, kw_only=True):
    """A message that was given up.

    Attributes:
        letter: the id of the dead letter; `id` is that of the message.
        reason: why.
        died_at: when, by the clock of the database.
    """

    letter: int
    reason: str
    died_at: datetime


def dead_letter_of(source: str, group: str | None, codec: Codec, row: tuple[Any, ...]) -> DeadLetter[Any]:
    """A row as a dead letter; a payload that cannot be decoded is as it is in the database."""
    letter, reason, died_at, kind, key, text, blob, headers, created_at, attempt, number = row
    return DeadLetter(
        source=source,
        group=group,
        id=number,
        payload=codec.look(text, blob, headers),
        type=kind,
        key=key,
        headers=headers or {},
        created_at=created_at,
        attempt=attempt,
        letter=letter,
        reason=reason,
        died_at=died_at,
    )


def letters_of(letters: Letters) -> list[str] | None:
    """The ids of dead letters, as text for the database; None for all."""
    if letters is None:
        return None
    each = [letters] if isinstance(letters, int | DeadLetter) else letters
    return [str(x.letter if isinstance(x, DeadLetter) else x) for x in each]


Letters = DeadLetter[Any] | int | Iterable[DeadLetter[Any] | int] | None
