"""Assertions about queues and streams. They look only, and say what is there instead."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from types import EllipsisType
from typing import Any

import msgspec
import psycopg
from psycopg.rows import DictRow, dict_row

from postbus.client import DeadLetter, Message
from postbus.errors import NotFound, translated
from postbus.serializers import JSON, Codec

_ALL = 2**31 - 1
_SHOWN = 20

_QUEUE = "select * from postbus.peek(%s::text, max => %s::int) order by id"
# Read as tables: no group is needed, and none moves. What upkeep has removed is not there any more.
_STREAM = """
    select l.id, l.type, l.key, l.payload, l.blob, l.headers, l.at as created_at, 0 as attempt, null as state
    from postbus.log l where l.stream_id = %(id)s
    union all
    select w.id, w.type, w.key, w.payload, w.blob, w.headers, w.created_at, 0, 'until ' || w.due
    from postbus.scheduled w where w.stream_id = %(id)s
    order by 1
"""
_GROUP = 'select pending, waiting, in_flight from postbus.list_groups() where stream = %s and "group" = %s'
_DEAD = "select * from postbus.dead_letters(%s::text, %s::text, max => %s::int)"


class Assertions:
    """Assertions about the queues and streams of a database; for tests.

    Arguments that are left out (``...``) fit everything. Payloads are compared as decoded: a dict with a
    dict, and a dataclass, msgspec struct or pydantic model as the dict that is sent for it.

    Example:
        >>> Assertions(dsn).assert_sent("emails", payload={"to": "someone@example.com"})  # doctest: +SKIP
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def assert_sent(
        self,
        queue: str,
        *,
        payload: Any = ...,
        type: str | EllipsisType = ...,
        key: str | EllipsisType | None = ...,
        count: int | None = None,
    ) -> list[Message[Any]]:
        """Assert that a queue has messages like this: ready, delayed or out with a worker.

        Args:
            queue: its name.
            payload: of the message.
            type: of the message.
            key: of the message.
            count: how many there are; default: at least one.

        Returns:
            The messages that fit.
        """
        __tracebackhide__ = True
        there = _There("queue", "message", queue, self._rows(_QUEUE, (queue, _ALL)))
        return there.check({"payload": payload, "type": type, "key": key}, count)

    def assert_published(
        self,
        stream: str,
        *,
        payload: Any = ...,
        type: str | EllipsisType = ...,
        key: str | EllipsisType | None = ...,
        count: int | None = None,
    ) -> list[Message[Any]]:
        """Assert that a stream has events like this, consumed or not.

        The arguments are those of `assert_sent`. Events that enter the stream later (`deliver_at`) count too.
        """
        __tracebackhide__ = True
        found = self._rows("select id from postbus.stream where name = %s::text", (stream,))
        if not found:
            raise NotFound(f"stream {stream!r} does not exist")
        there = _There("stream", "event", stream, self._rows(_STREAM, {"id": found[0]["id"]}))
        return there.check({"payload": payload, "type": type, "key": key}, count)

    def assert_empty(self, name: str, *, group: str | None = None) -> None:
        """Assert that a queue has no messages in any state, or that a group has nothing left to do.

        Args:
            name: of the queue, or of the stream.
            group: of the stream.
        """
        __tracebackhide__ = True
        if group is None:
            there = _There("queue", "message", name, self._rows(_QUEUE, (name, _ALL)))
            if there.rows:
                raise AssertionError(f"{there} is not empty; {there.listing}")
            return
        self._rows("select postbus.tick(%s::text)", (name,))  # what was just published is pending too
        found = self._rows(_GROUP, (name, group))
        if not found:
            raise NotFound(f"group {group!r} of stream {name!r} does not exist")
        left = [f"{count} {what.replace('_', ' ')}" for what, count in found[0].items() if count]
        if left:
            raise AssertionError(f"group {group!r} of stream {name!r} is not done: {', '.join(left)}")

    def dead_letters(self, name: str, *, group: str | None = None) -> list[DeadLetter[Any]]:
        """The dead letters of a queue, or of a stream's groups, in the order in which they died."""
        return [
            DeadLetter(
                **_fields(name, {**row, "id": row["event_id"]}),
                letter=row["id"],
                reason=row["reason"],
                died_at=row["died_at"],
            )
            for row in self._rows(_DEAD, (name, group, _ALL))
        ]

    def _rows(self, query: str, params: Any) -> list[DictRow]:
        with psycopg.connect(self._dsn, row_factory=dict_row) as conn, translated():
            return conn.execute(query.encode(), params).fetchall()


def _fields(source: str, row: DictRow) -> dict[str, Any]:
    return {
        "source": source,
        "id": row["id"],
        "payload": Codec().look(row["payload"], row["blob"], row["headers"]),
        "type": row["type"],
        "key": row["key"],
        "headers": row["headers"] or {},
        "created_at": row["created_at"],
        "attempt": row["attempt"],
        "group": row.get("group_name"),
        "priority": row.get("priority") or 0,
        "state": row.get("saved"),
    }


@dataclass(frozen=True)
class _There:
    """What a queue or stream holds."""

    kind: str
    what: str
    name: str
    rows: list[DictRow]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    def check(self, asked: dict[str, Any], count: int | None) -> list[Message[Any]]:
        """Those that fit, if there are as many as there should be."""
        __tracebackhide__ = True
        asked = {name: value for name, value in asked.items() if value is not ...}
        fitting = [
            m
            for m in (Message(**_fields(self.name, row)) for row in self.rows)
            if all(_same(getattr(m, name), value) for name, value in asked.items())
        ]
        if (count is None and fitting) or len(fitting) == count:
            return fitting
        like = f"{self.what}s" + " with " * bool(asked) + ", ".join(f"{n}={v!r}" for n, v in asked.items())
        wanted = f"no {like}" if count is None else f"{len(fitting)} {like}, not {count}"
        raise AssertionError(f"{self} has {wanted}; {self.listing}")

    @property
    def listing(self) -> str:
        """All of it, for people."""
        if not self.rows:
            return f"it has no {self.what}s at all"
        lines = [f"it has {len(self.rows)}:"]
        for row in self.rows[:_SHOWN]:
            m = Message(**_fields(self.name, row))
            parts = [f"{m.id}", f"type={m.type!r}", f"key={m.key!r}", f"payload={m.payload!r}"]
            lines.append("  " + " ".join([*parts, row["state"] or ""]).rstrip())
        if len(self.rows) > _SHOWN:
            lines.append(f"  and {len(self.rows) - _SHOWN} more")
        return "\n".join(lines)


def _same(actual: Any, expected: Any) -> bool:
    if actual == expected:
        return True
    if is_dataclass(expected) or isinstance(expected, msgspec.Struct) or hasattr(expected, "model_dump"):
        return bool(actual == JSON().loads(JSON().dumps(expected)))
    return False
