"""The engine's clock, moved for every session of a database.

The engine asks a function or two for the time, and the setting ``postbus.fake_now`` can move those for one
session. A test has many sessions: those of pools, of frameworks and of other processes. So the clock replaces
the functions themselves: every session finds the new ones with its next transaction, and the time goes on
from where it was set.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import psycopg

from postbus.errors import BadArgument

_READERS = """
    select pg_get_functiondef(p.oid) from pg_proc p
    where p.pronamespace = 'postbus'::regnamespace and p.prokind = 'f'
      and pg_get_functiondef(p.oid) like '%%postbus.fake_now%%'
"""
_TIME = re.compile(r"\b(?:clock|transaction)_timestamp\(\)")


class Clock:
    """Moves the engine's time in one database; for tests.

    Args:
        dsn: the database, as the owner of the engine.

    Example:
        >>> clock.move(hours=1)  # doctest: +SKIP
        >>> clock.set(datetime(2030, 1, 1, 9, tzinfo=UTC))  # doctest: +SKIP
        >>> clock.reset()  # doctest: +SKIP
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._readers: list[str] = []
        self._ahead = timedelta()

    def now(self) -> datetime:
        """The engine's time."""
        with psycopg.connect(self._dsn) as conn:
            return _one(conn, "select postbus.now_()")

    def move(
        self, *, weeks: float = 0, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Move the time on, from where it is now."""
        ahead = timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
        self._put(self._ahead + ahead)

    def set(self, to: datetime) -> None:
        """Set the time. It goes on from there."""
        if to.tzinfo is None:
            raise BadArgument(f"{to} has no time zone", hint="Give it one: datetime(..., tzinfo=UTC).")
        with psycopg.connect(self._dsn) as conn:
            real = _one(conn, "select clock_timestamp()")
        self._put(to - real)

    def reset(self) -> None:
        """Go back to the real time."""
        self._put(timedelta())

    def _put(self, ahead: timedelta) -> None:
        moved = f"({{0}} + interval '{ahead.days} days {ahead.seconds} seconds {ahead.microseconds} us')"
        with psycopg.connect(self._dsn) as conn:
            if not self._readers:
                self._readers = [text for (text,) in conn.execute(_READERS)]
            for text in self._readers:
                conn.execute(_TIME.sub(lambda m: moved.format(m[0]), text).encode())
        self._ahead = ahead


def _one(conn: psycopg.Connection[tuple[datetime]], query: str) -> datetime:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
