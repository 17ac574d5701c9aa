"""Postbus: queues, streams and consumer groups inside PostgreSQL."""

from postbus._version import __version__
from postbus.errors import (
    AccessDenied,
    AlreadyExists,
    BadArgument,
    EmbeddedError,
    LeaseLost,
    NotFound,
    PositionLost,
    PostbusError,
    QueueFull,
    WrongVersion,
)

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "BadArgument",
    "EmbeddedError",
    "LeaseLost",
    "NotFound",
    "PositionLost",
    "PostbusError",
    "QueueFull",
    "WrongVersion",
    "__version__",
]
