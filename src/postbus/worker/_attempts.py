"""One call of a handler, and what becomes of its message.

Every message gets an outcome, whatever the handler does: until then it stays on a lease that is extended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from postbus import _telemetry
from postbus.client._async._consumer import AsyncConsumer
from postbus.client._async._delivery import AsyncDelivery
from postbus.client._outcome import Outcome, nack
from postbus.worker._calls import TooLate
from postbus.worker._lines import Part
from postbus.worker._policy import outcome_of

log = logging.getLogger("postbus")

STOPPED = "the worker was stopped"


class Attempts:
    """Calls handlers, and knows which ones are at work.

    Attributes:
        handled: how many messages were handled successfully.
        failed: how many failed.
        committed: receipts of messages that were acked in a transaction of their handler.
    """

    def __init__(self, name: str) -> None:
        self.handled = 0
        self.failed = 0
        self.committed: set[str] = set()
        self._name = name
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._lost: set[str] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def make(
        self, consumer: AsyncConsumer[Any], m: AsyncDelivery[Any], part: Part, task: asyncio.Task[Any]
    ) -> bool:
        """Call the handler, and note what became of the message; true if it is still to be acked.

        Args:
            consumer: where it came from.
            m: the message.
            part: the handler.
            task: the caller's own.
        """
        self._running[m.receipt] = task
        try:
            await part.call(m)
        except asyncio.CancelledError:
            if m.receipt in self._lost:
                self.failed += 1
            elif task.cancelling():
                self._settle(consumer, m, nack(0, STOPPED))
                raise
            else:
                self._fails(consumer, m, part, RuntimeError("it was cancelled, and not by the worker"))
        except TooLate as exc:
            self.failed += 1
            log.warning("%s: message %s was handled too late, and rolled back: %s", self._name, m.id, exc)
            del self._running[m.receipt]
            consumer.lose(m.batch or m.receipt)
        except (Exception, SystemExit) as exc:
            self._fails(consumer, m, part, exc)
        except BaseException as exc:
            self._fails(consumer, m, part, exc)
            raise
        else:
            self.handled += 1
            if not part.handler.manual_ack and m.receipt not in self.committed:
                return True
            self._finished(consumer, m)
        finally:
            self._running.pop(m.receipt, None)
            if m.receipt in self._lost:
                self._lost.discard(m.receipt)
                task.uncancel()
        return False

    def lose(self, receipts: set[str]) -> None:
        """Somebody else may have these: whoever works on one is told to stop."""
        for receipt in receipts - self._lost:
            task = self._running.get(receipt)
            if task is not None:
                self._lost.add(receipt)
                task.cancel("the lease was lost")

    def _settle(self, consumer: AsyncConsumer[Any], m: AsyncDelivery[Any], outcome: Outcome) -> None:
        """Note an outcome, unless the transaction of the handler has had the last word."""
        if m.receipt in self.committed:
            self._finished(consumer, m)
        else:
            consumer.settle(m.receipt, outcome)

    def _finished(self, consumer: AsyncConsumer[Any], m: AsyncDelivery[Any]) -> None:
        """The handler has settled it: by its own verbs, or in its transaction."""
        consumer.forget(m.receipt)
        if m.receipt in self.committed:
            self.committed.discard(m.receipt)
            _telemetry.count("acked_total", 1, m.source)

    def _fails(
        self, consumer: AsyncConsumer[Any], m: AsyncDelivery[Any], part: Part, exc: BaseException
    ) -> None:
        self.failed += 1
        handler = part.handler
        outcome = outcome_of(
            exc,
            m.attempt,
            backoff=handler.backoff,
            max_attempts=handler.max_attempts,
            keeps_state=m.group is None,
        )
        what = "goes to the dead letters" if outcome.verb == "dead_letter" else "comes again"
        if m.receipt in self.committed:
            what = "is done all the same, its transaction had committed"
        log.warning("%s: message %s, attempt %s, %s: %s", self._name, m.id, m.attempt, what, outcome.reason)
        log.debug("%s: message %s", self._name, m.id, exc_info=exc)
        self._settle(consumer, m, outcome)
