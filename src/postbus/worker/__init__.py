"""Workers: handlers for queues, streams and times, in one process that looks after itself.

Example:
    >>> from postbus import Message, Worker
    >>> worker = Worker()
    >>> @worker.queue("emails", concurrency=8)
    ... async def send_email(m: Message[dict]) -> None: ...
    >>> worker.main()  # doctest: +SKIP
"""

from postbus.worker._policy import Backoff, GiveUp, Retry
from postbus.worker._worker import Worker

__all__ = ["Backoff", "GiveUp", "Retry", "Worker"]
