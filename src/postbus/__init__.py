"""Postbus: queues, streams and consumer groups inside PostgreSQL.

Names are imported when they are first used: the command line would have to wait for all of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from postbus._version import __version__

if TYPE_CHECKING:
    from postbus.client import (
        AsyncBus,
        AsyncDelivery,
        AsyncGroup,
        AsyncQueue,
        AsyncStream,
        Bus,
        DeadLetter,
        Delivery,
        Group,
        Message,
        Queue,
        Stream,
    )
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
        Undecodable,
        WrongVersion,
    )
    from postbus.worker import Worker

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "AsyncBus",
    "AsyncDelivery",
    "AsyncGroup",
    "AsyncQueue",
    "AsyncStream",
    "BadArgument",
    "Bus",
    "DeadLetter",
    "Delivery",
    "EmbeddedError",
    "Group",
    "LeaseLost",
    "Message",
    "NotFound",
    "PositionLost",
    "PostbusError",
    "Queue",
    "QueueFull",
    "Stream",
    "Undecodable",
    "Worker",
    "WrongVersion",
    "__version__",
]

_HOMES = {"Worker": "postbus.worker"} | dict.fromkeys(
    (
        "AsyncBus",
        "AsyncDelivery",
        "AsyncGroup",
        "AsyncQueue",
        "AsyncStream",
        "Bus",
        "DeadLetter",
        "Delivery",
        "Group",
        "Message",
        "Queue",
        "Stream",
    ),
    "postbus.client",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "postbus.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
