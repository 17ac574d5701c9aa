"""Small words for windows: positions, parts, what is in them."""

from __future__ import annotations

import json
import random
from struct import unpack
from typing import Any

import psycopg

from tests.stress.sessions import STREAM, value

Connection = psycopg.Connection[Any]


def position(c: Connection, at: str = "latest", holder: str | None = None, of: str = STREAM) -> str:
    return str(value(c, "select postbus.position(%s, %s, %s)", of, at, holder))


def plan(
    c: Connection, since: str, until: str, parts: int = 1, most: int | None = None, of: str = STREAM
) -> list[tuple[str, int]]:
    return c.execute(
        "select * from postbus.plan_window(%s, %s, %s, %s, %s)", [of, since, until, parts, most]
    ).fetchall()


def read(c: Connection, part: str, of: str = STREAM) -> list[tuple[int, str]]:
    """The events of a part, as (id, payload)."""
    return c.execute("select id, payload from postbus.read_window(%s, %s)", [of, part]).fetchall()


def by_columns(c: Connection, part: str, of: str = STREAM, chunk: int = 3) -> list[tuple[int, str]]:
    """The same, put together from the columns."""
    rows = c.execute(
        "select events, id, payload, payload_lengths"
        " from postbus.read_columns(%s, %s, '{payload}', chunk => %s)",
        [of, part, chunk],
    ).fetchall()
    found = []
    for events, ids, payloads, lengths in rows:
        assert 0 < events <= chunk
        at = 0
        for i, n in zip(unpack(f"!{events}q", ids), unpack(f"!{events}i", lengths), strict=True):
            found.append((i, payloads[at : at + n].decode()))
            at += n
        assert at == len(payloads)
    return found


def window(c: Connection, since: str, until: str, parts: int = 1, of: str = STREAM) -> list[str]:
    """The payloads of a window, in the order of the plan."""
    return [payload for part, _ in plan(c, since, until, parts, of=of) for _, payload in read(c, part, of)]


def bound(
    c: Connection, since: str, until: str, most: int, holder: str | None = None, of: str = STREAM
) -> str:
    return str(value(c, "select postbus.bound_window(%s, %s, %s, %s, %s)", of, since, until, most, holder))


def count(c: Connection, since: str, until: str, most: int | None = None, of: str = STREAM) -> int:
    return int(value(c, "select postbus.count_window(%s, %s, %s, %s)", of, since, until, most))


class Reader:
    """Reads a stream window by window, in random parts, as Spark does; sometimes a window twice."""

    def __init__(
        self, c: Connection, seed: int, *, group: str | None = None, replica: Connection | None = None
    ) -> None:
        self.c = c
        self.tasks = replica or c
        self.rnd = random.Random(f"{seed}/reader")
        self.holder = f"reader-{seed}"
        self.group = group
        self.at = position(c, "earliest", self.holder)
        self.got: list[str] = []
        self.windows = 0
        self.most = 0

    def step(self) -> int:
        """One micro-batch: how many events it had."""
        until = position(self.c, holder=self.holder)
        most = self.rnd.choice([None, None, 1, 7, 50, 400])
        if most is not None:
            until = bound(self.c, self.at, until, most, self.holder)
        rows = self._read(until)
        assert most is None or len(rows) <= most, (len(rows), most)
        ids = [i for i, _ in rows]
        assert len(set(ids)) == len(ids), "an id twice in a window"
        if self.rnd.random() < 0.2:
            assert sorted(self._read(until)) == sorted(rows), "a window that is not the same again"
            assert count(self.c, self.at, until) == len(rows)
        if not rows and most is not None:
            assert count(self.c, self.at, until) == 0
        self.got += [json.loads(p)["u"] for _, p in rows]
        self.windows += bool(rows)
        self.most = max(self.most, len(rows))
        self.at = until
        if self.group is not None:
            value(self.c, "select postbus.follow_group(%s, %s, %s)", STREAM, self.group, self.at)
        return len(rows)

    def _read(self, until: str) -> list[tuple[int, str]]:
        parts = plan(self.c, self.at, until, self.rnd.choice([1, 2, 5, 13]), self.rnd.choice([None, 3, 20]))
        estimate = sum(n for _, n in parts)
        self.rnd.shuffle(parts)
        rows = []
        for part, n in parts:
            mine = self.rnd.choice([read, by_columns])(self.tasks, part)
            assert [i for i, _ in mine] == sorted(i for i, _ in mine)
            assert len(mine) <= n, (part, n, len(mine))
            rows += mine
        assert len(rows) <= estimate
        return rows
