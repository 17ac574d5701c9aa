"""The errors of Postbus: one class per SQLSTATE of the engine, and one for the embedded server.

Example:
    >>> from postbus.errors import translated
    >>> with translated():  # doctest: +SKIP
    ...     conn.execute("select postbus.send('nowhere', '{}'::jsonb)")
    Traceback (most recent call last):
    postbus.errors.NotFound: queue "nowhere" does not exist
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import psycopg


class PostbusError(Exception):
    """Base of every error that Postbus raises itself.

    Attributes:
        message: what went wrong, naming the object.
        detail: the DETAIL of the engine, if any.
        hint: the remedy, if the engine knows one.
        sqlstate: the code the engine raised (class ``PB``), or None.
    """

    code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint
        self.sqlstate = sqlstate or self.code

    def __str__(self) -> str:
        return "\n".join(part for part in (self.message, self.detail, self.hint) if part)


class NotFound(PostbusError):  # noqa: N818 - the names of the domain, see docs/glossary.md
    """The queue, stream, group, schedule or message does not exist (PB001)."""

    code = "PB001"


class AlreadyExists(PostbusError):  # noqa: N818
    """The name is taken (PB002)."""

    code = "PB002"


class BadArgument(PostbusError):  # noqa: N818
    """An argument or an option has no meaning here (PB003)."""

    code = "PB003"


class LeaseLost(PostbusError):  # noqa: N818
    """The lease of the receipt ran out and somebody else may hold the message (PB004)."""

    code = "PB004"


class PositionLost(PostbusError):  # noqa: N818
    """The position asked for is no longer kept by the stream (PB005)."""

    code = "PB005"


class QueueFull(PostbusError):  # noqa: N818
    """The queue or the key has reached its maximum size (PB006)."""

    code = "PB006"


class AccessDenied(PostbusError):  # noqa: N818
    """The role may not do this; see ``postbus.grant_access`` (PB007)."""

    code = "PB007"


class WrongVersion(PostbusError):  # noqa: N818
    """The engine in the database and this package do not fit together (PB008)."""

    code = "PB008"


class Undecodable(PostbusError):  # noqa: N818
    """The payload of a message cannot be decoded: it goes to the dead letters with this reason."""


class EmbeddedError(PostbusError):
    """The embedded PostgreSQL could not be found, started or stopped.

    ``hint`` is the remedy; ``log`` is the end of the server log, which is also part of the text.
    """

    def __init__(self, message: str, *, remedy: str, log: str = "") -> None:
        detail = f"The server log ends with:\n{log.rstrip()}" if log.strip() else None
        super().__init__(message, detail=detail, hint=remedy)
        self.log = log


_CLASSES: dict[str, type[PostbusError]] = {
    cls.code: cls
    for cls in (
        NotFound,
        AlreadyExists,
        BadArgument,
        LeaseLost,
        PositionLost,
        QueueFull,
        AccessDenied,
        WrongVersion,
    )
    if cls.code is not None
}


def from_sqlstate(
    state: str | None, message: str, detail: str | None = None, hint: str | None = None
) -> PostbusError | None:
    """Return the Postbus error for a SQLSTATE of the engine, or None for any other SQLSTATE."""
    if state is None or not state.startswith("PB"):
        return None
    return _CLASSES.get(state, PostbusError)(message, detail=detail, hint=hint, sqlstate=state)


def from_psycopg(exc: psycopg.Error) -> PostbusError | None:
    """Return the Postbus error for an error of the engine, or None if the engine did not raise it."""
    diag = exc.diag
    return from_sqlstate(
        exc.sqlstate, diag.message_primary or str(exc), diag.message_detail, diag.message_hint
    )


@contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of the engine as their Postbus classes; let every other error pass unchanged."""
    try:
        yield
    except psycopg.Error as exc:
        error = from_psycopg(exc)
        if error is None:
            raise
        raise error from exc
