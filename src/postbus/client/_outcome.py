"""What became of a message, for the ones that settle many at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from postbus.client import _sql


class Outcome(NamedTuple):
    """One of the verbs, with its arguments. Messages of the same outcome are settled in one call."""

    verb: str
    delay: float | None = None
    reason: str | None = None
    state: str | None = None


ACK = Outcome("ack")
RELEASE = Outcome("release")


def nack(delay: float | None = None, reason: str | None = None, state: Any = None) -> Outcome:
    """It comes again."""
    saved = None if state is None else msgspec.json.encode(state).decode()
    return Outcome("nack", delay, storable(reason), saved)


def dead_letter(reason: str | None = None) -> Outcome:
    """It is given up."""
    return Outcome("dead_letter", None, storable(reason))


def statement(outcome: Outcome, receipts: list[str]) -> tuple[str, tuple[Any, ...]]:
    """What tells the database."""
    if outcome.verb == "ack":
        return _sql.ACK, (receipts,)
    if outcome.verb == "release":
        return _sql.RELEASE, (receipts,)
    if outcome.verb == "dead_letter":
        return _sql.DEAD_LETTER, (receipts, outcome.reason)
    return _sql.NACK, (receipts, outcome.delay, outcome.reason, outcome.state)


def reason_of(exc: BaseException) -> str:
    """What to write beside a message whose handler failed."""
    text = str(exc)
    name = type(exc).__qualname__
    return f"{name}: {text}" if text else name


def storable(reason: str | None) -> str | None:
    """A reason that the database takes whatever is in it, and that is not too long to look at."""
    if reason is None:
        return None
    return reason[:2000].replace("\0", "\\0").encode(errors="backslashreplace").decode()
