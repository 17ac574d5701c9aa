"""Which of the messages in hand may begin: in the order of their keys, and so many at a time per handler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from postbus.client._async._delivery import AsyncDelivery
from postbus.worker._handler import Call, Handler, in_time, observed
from postbus.worker._policy import Bucket


class Part:
    """A handler as its subscription sees it.

    Attributes:
        call: how it is called, with everything around it.
        free: how many more messages it may begin now.
        waiting: items that are for it, and may begin when it is free.
    """

    __slots__ = ("_bare", "bucket", "call", "free", "handler", "waiting")

    def __init__(self, handler: Handler, call: Call) -> None:
        self.handler = handler
        self.call = self._bare = in_time(call, handler.timeout)
        self.bucket = None if handler.rate is None else Bucket(handler.rate, handler.burst)
        self.free = handler.concurrency
        self.waiting: deque[Item] = deque()

    def reset(self) -> None:
        """Begin with nothing in hand."""
        self.call = observed(self._bare)
        self.free = self.handler.concurrency
        self.waiting.clear()


class Item(NamedTuple):
    """A message that is first in its line, with the handler it is for."""

    m: AsyncDelivery[Any]
    line: Hashable | None
    part: Part


class Lines:
    """Messages in hand that may not begin yet.

    With an order, messages of one key (ordering ``stream``: all of them) stand in one line, and only the
    first is begun. When it goes back it takes those behind it along: `holds` then says no.

    Args:
        ordering: of the group; ``none`` for queues.
        part_of: the part that a type of messages is for.
        holds: whether a receipt is still ours to begin.
    """

    def __init__(self, ordering: str, part_of: Callable[[str], Part], holds: Callable[[str], bool]) -> None:
        self._ordering = ordering
        self._part_of = part_of
        self._holds = holds
        self._behind: dict[Hashable, deque[AsyncDelivery[Any]]] = {}
        self._parts: set[Part] = set()

    def enter(self, m: AsyncDelivery[Any]) -> Item | None:
        """A message has come; returns it if it may begin now."""
        line = self._line_of(m)
        if line is not None:
            behind = self._behind.get(line)
            if behind is not None:
                behind.append(m)
                return None
            self._behind[line] = deque()
        return self._admit(m, line)

    def passes(self, m: AsyncDelivery[Any], part: Part) -> bool:
        """Whether a message may begin now and stands in no line. It leaves with the line None."""
        if part.free <= 0 or self._line_of(m) is not None:
            return False
        part.free -= 1
        return True

    def leave(self, part: Part, line: Hashable | None) -> list[Item]:
        """A message has been settled; returns those that may begin now because of it."""
        part.free += 1
        if line is None and not part.waiting:
            return []
        ready: list[Item] = []
        todo = [line]  # lines whose first message is gone
        while part.free > 0 and part.waiting:
            first = part.waiting.popleft()
            if self._holds(first.m.receipt):
                part.free -= 1
                ready.append(first)
            else:
                todo.append(first.line)
        for each in todo:
            following = self._next_of(each)
            if following is not None:
                ready.append(following)
        return ready

    def clear(self) -> list[str]:
        """Forget all that wait; returns their receipts."""
        found = [m.receipt for behind in self._behind.values() for m in behind]
        for behind in self._behind.values():
            behind.clear()
        for part in self._parts:
            found += [item.m.receipt for item in part.waiting]
            part.waiting.clear()
        return found

    def _line_of(self, m: AsyncDelivery[Any]) -> Hashable | None:
        if self._ordering == "key":
            return m.key
        return "" if self._ordering == "stream" else None

    def _admit(self, m: AsyncDelivery[Any], line: Hashable | None) -> Item | None:
        part = self._part_of(m.type)
        item = Item(m, line, part)
        if part.free > 0:
            part.free -= 1
            return item
        part.waiting.append(item)
        self._parts.add(part)
        return None

    def _next_of(self, line: Hashable | None) -> Item | None:
        """The first message behind one that is done, if it may begin."""
        if line is None:
            return None
        behind = self._behind[line]
        while behind:
            m = behind.popleft()
            if self._holds(m.receipt):
                return self._admit(m, line)
        del self._behind[line]
        return None
