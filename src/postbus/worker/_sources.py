"""Where the messages of a subscription come from."""

from __future__ import annotations

import logging
from typing import Any

from postbus.client import _sql
from postbus.client._async._bus import AsyncBus
from postbus.client._async._queue import AsyncQueue
from postbus.client._async._stream import AsyncGroup
from postbus.errors import BadArgument
from postbus.serializers import Codec
from postbus.worker._handler import Handler

log = logging.getLogger("postbus")

Codecs = dict[str | None, Codec]


class _Ignored(Codec):
    """For events that no handler is for: they may look like anything."""

    def decode(self, text: str | None, blob: bytes | None, headers: dict[str, Any] | None) -> Any:
        """Nothing."""
        return None


_IGNORED = _Ignored()


class QueueSource(AsyncQueue[Any]):
    """A queue whose handlers are each for a type of messages, and decode them into a model of their own."""

    def __init__(self, bus: AsyncBus, name: str, codecs: Codecs) -> None:
        super().__init__(bus, name, _IGNORED)
        self._codecs = codecs
        # With one handler for the rest, or with several types, everything is taken.
        self._only = next(iter(codecs)) if len(codecs) == 1 else None

    def codec_of(self, type: str) -> Codec:
        """For consumers: what decodes messages of a type."""
        return self._codecs.get(type) or self._codecs[None]

    async def take(self, max: int, lease: float | None) -> list[tuple[Any, ...]]:
        """For consumers: rows on a lease."""
        return await self.bus.fetch(_sql.RECEIVE, (self.name, max, lease, self.bus.name, self._only))


class GroupSource(AsyncGroup[Any]):
    """The same for a group. Events of other types are none of its business, and done with."""

    codecs: Codecs

    def codec_of(self, type: str) -> Codec:
        """For consumers: what decodes events of a type."""
        return self.codecs.get(type) or self.codecs.get(None) or _IGNORED


def subscriptions_of(handlers: list[Handler]) -> list[list[Handler]]:
    """Which handlers share a consumer.

    Those of a group share its position. Those of a queue ask for their types one by one, unless one of them
    is for the rest: it must not get what is for another.

    Raises:
        BadArgument: two handlers are for the same messages.
    """
    rest = {h.source for h in handlers if h.group is None and h.type is None}
    found: dict[tuple[str, str | None, str | None], list[Handler]] = {}
    for handler in handlers:
        alone = handler.group is None and handler.source not in rest
        key = (handler.source, handler.group, handler.type if alone else None)
        found.setdefault(key, []).append(handler)
    for together in found.values():
        types = [h.type for h in together]
        for handler in together:
            if types.count(handler.type) > 1:
                what = "all messages" if handler.type is None else f"messages of type {handler.type!r}"
                raise BadArgument(
                    f"{handler.what}: another handler is for {what} already",
                    hint="Give them different types, or call one function from the other.",
                )
    return list(found.values())


async def open_source(bus: AsyncBus, handlers: list[Handler]) -> QueueSource | GroupSource:
    """The queue or group of some handlers, made if that is wanted.

    Raises:
        NotFound: it does not exist, and nobody said to make it.
    """
    first = handlers[0]
    codecs: Codecs = {h.type: Codec(h.serializer, h.model) for h in handlers}
    create = any(h.create for h in handlers)
    options: dict[str, Any] = {}
    for handler in handlers:
        if handler.create:
            if handler.max_attempts is not None:  # counts also where a worker dies
                options.setdefault("max_attempts", handler.max_attempts)
            options |= handler.options
    if first.group is None:
        if create:
            await bus.create("queue", first.source, options=options)
        queue = QueueSource(bus, first.source, codecs)
        await queue.default_lease()
        return queue
    stream = await bus.stream(first.source)
    await stream.group(first.group, create=create, **(options if create else {}))
    group = GroupSource(stream, first.group)
    group.codecs = codecs
    await group.default_lease()  # says in so many words what does not exist
    ordering = await group.ordering()
    if options.get("ordering", ordering) != ordering:
        log.warning(
            "group %r of stream %r exists and has ordering %s, not %s",
            first.group,
            first.source,
            ordering,
            options["ordering"],
        )
    return group
