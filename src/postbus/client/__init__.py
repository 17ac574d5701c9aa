"""The client: `Bus` and `AsyncBus`, one API for both."""

from postbus.client._async._bus import AsyncBus
from postbus.client._async._delivery import AsyncDelivery
from postbus.client._async._queue import AsyncQueue
from postbus.client._async._stream import AsyncGroup, AsyncStream
from postbus.client._message import DeadLetter, Message
from postbus.client._sync._bus import Bus
from postbus.client._sync._delivery import Delivery
from postbus.client._sync._queue import Queue
from postbus.client._sync._stream import Group, Stream

__all__ = [
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
]
