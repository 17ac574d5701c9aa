"""Small words for schedules: who publishes what, who gets what, in which session."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[Any]

STREAM = "s"
GROUP = "g"


def stream(c: Connection, name: str = STREAM, **options: Any) -> None:
    c.execute("select postbus.create_stream(%s, %s)", [name, Jsonb(options)])


def group(c: Connection, name: str = GROUP, *, of: str = STREAM, **options: Any) -> None:
    c.execute("select postbus.create_group(%s, %s, %s)", [of, name, Jsonb({"start": "earliest", **options})])


def alter(c: Connection, name: str = STREAM, **options: Any) -> None:
    c.execute("select postbus.alter_stream(%s, %s)", [name, Jsonb(options)])


def publish(c: Connection, payload: str, key: str | None = None, to: str = STREAM) -> int:
    return int(value(c, "select postbus.publish(%s, %s, key => %s)", to, payload, key))


def consume(
    c: Connection, max: int = 100, lease: str = "1 hour", *, of: str = STREAM, by: str = GROUP
) -> list[tuple[str, str, int]]:
    """One batch, as (payload, receipt, attempt)."""
    rows = c.execute(
        "select payload, receipt, attempt from postbus.consume(%s, %s, %s, %s::interval)",
        [of, by, max, lease],
    )
    return [(r[0], r[1], r[2]) for r in rows.fetchall()]


def ack(c: Connection, *receipts: str) -> int:
    return int(value(c, "select postbus.ack(%s::text[])", list(receipts)))


def take(c: Connection, max: int = 100, *, of: str = STREAM, by: str = GROUP) -> list[str]:
    """Consume and ack until nothing comes, twice over; the payloads in order.

    A consume that finds somebody else just cutting a tick or passing a lane change returns nothing once.
    """
    got: list[str] = []
    empty = 0
    while empty < 10:
        rows = consume(c, max, of=of, by=by)
        empty = 0 if rows else empty + 1
        if rows:
            ack(c, *[r[1] for r in rows])
            got += [r[0] for r in rows]
    return got


def maintain(c: Connection, times: int = 1) -> dict[str, int]:
    """What upkeep did, by step. A problem fails the test."""
    done: dict[str, int] = {}
    for _ in range(times):
        for object_, step, n, problem in c.execute("select * from postbus.maintain()").fetchall():
            assert problem is None, f"{object_} {step}: {problem}"
            done[step] = done.get(step, 0) + n
    return done


def rotate(c: Connection, name: str = STREAM) -> int:
    """Upkeep until the stream writes to another leaf, which is returned."""
    before = leaf(c, name)
    wait_for(lambda: (maintain(c), leaf(c, name) != before)[1], "rotation")
    return leaf(c, name)


def leaf(c: Connection, name: str = STREAM) -> int:
    return int(value(c, "select leaf from postbus.stream where name = %s", name))


def rows_in(c: Connection, leaf_no: int) -> int:
    return int(one(c, sql.SQL("select count(*) from {}").format(sql.Identifier("postbus", f"log_{leaf_no}"))))


def value(c: Connection, query: str, *args: Any) -> Any:
    return one(c, query.encode(), *args)


def one(c: Connection, query: sql.Composed | bytes, *args: Any) -> Any:
    row = c.execute(query, args).fetchone()
    assert row is not None
    return row[0]


def wait_for(true: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"no {what} in {seconds} s"
        time.sleep(0.005)


def wait_until_blocked(c: Connection, blocked: Connection) -> None:
    """Until that session waits for a lock."""
    pid = blocked.info.backend_pid
    wait_for(
        lambda: bool(value(c, "select count(*) from pg_locks where pid = %s and not granted", pid)),
        "lock wait",
    )
