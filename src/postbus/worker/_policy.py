"""What happens to a message whose handler fails, and how fast handlers may run."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from typing import Any

from postbus.client._outcome import Outcome, dead_letter, nack, reason_of
from postbus.errors import BadArgument, PostbusError

LONGEST = 10 * 365 * 86400.0  # seconds; what the database takes as a delay without complaint


class Retry(PostbusError):  # noqa: N818 - what a handler wants, not what went wrong
    """Raised by a handler: give the message back, to come again.

    Args:
        reason: kept with the message.
        delay: seconds; default: the policy of the handler, else the backoff of the queue or group.
        state: what the next attempt finds in ``m.state`` (queues).

    Example:
        >>> raise Retry("the bank is closed", delay=3600)  # doctest: +SKIP
    """

    def __init__(self, reason: str = "retry", *, delay: float | None = None, state: Any = None) -> None:
        super().__init__(reason)
        if delay is not None and not 0 <= delay < math.inf:
            raise BadArgument(f"delay is a number of seconds, not {delay!r}")
        self.delay = delay
        self.state = state


class GiveUp(PostbusError):  # noqa: N818
    """Raised by a handler: the message goes to the dead letters now.

    Example:
        >>> raise GiveUp("there is no such customer")  # doctest: +SKIP
    """


@dataclass(frozen=True)
class Backoff:
    """How long a failed message waits: `first` seconds, then `factor` times as long after each attempt.

    Args:
        first: seconds after the first failure.
        factor: how much longer after each one.
        longest: the most.
        jitter: up to this part is added or taken away at random, so that what failed together does not come
            back together.

    Example:
        >>> Backoff(first=2, factor=3, jitter=0).delay(3)
        18.0
    """

    first: float = 1.0
    factor: float = 2.0
    longest: float = 3600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if self.first < 0 or self.factor < 1 or self.longest < 0 or not 0 <= self.jitter <= 1:
            raise BadArgument(f"{self} has no meaning", hint="factor is at least 1, jitter from 0 to 1.")

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this attempt."""
        try:
            wait = min(self.longest, float(self.first * self.factor ** (attempt - 1)))
        except OverflowError:
            wait = self.longest
        return wait * (1 + self.jitter * random.uniform(-1, 1))  # noqa: S311 - not a secret


def outcome_of(
    exc: BaseException,
    attempt: int,
    *,
    backoff: Backoff | None,
    max_attempts: int | None,
    keeps_state: bool = True,
) -> Outcome:
    """What becomes of a message whose handler raised."""
    if isinstance(exc, GiveUp):
        return dead_letter(exc.message)
    reason = exc.message if isinstance(exc, Retry) else reason_of(exc)
    if max_attempts is not None and attempt >= max_attempts:
        return dead_letter(reason)
    delay = exc.delay if isinstance(exc, Retry) else None
    if delay is None and backoff is not None:
        delay = backoff.delay(attempt)
    if delay is not None:
        delay = min(delay, LONGEST)
    state = exc.state if isinstance(exc, Retry) else None
    if state is None:
        return nack(delay, reason)
    if not keeps_state:
        return nack(delay, f"{reason} (its state was dropped: messages of a stream have none)")
    try:
        return nack(delay, reason, state)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        return nack(delay, f"{reason} (its state was dropped: {problem})")


class Bucket:
    """A token bucket: `rate` a second, up to `burst` at once."""

    def __init__(self, rate: float, burst: int | None = None) -> None:
        if rate <= 0 or (burst is not None and burst < 1):
            raise BadArgument("rate must be above 0 and burst at least 1")
        self._rate = rate
        self._burst = float(burst or max(1, round(rate)))
        self._tokens = self._burst
        self._at = time.monotonic()

    async def take(self) -> None:
        """Wait for a token; each takes it in advance, so whoever came first is served first."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


class Slots:
    """A number of handlers at a time for the whole worker, given out in strict or weighted order.

    Strict: the one of the lowest rank among those that wait. Weighted: turns in proportion to the weights.
    """

    def __init__(self, count: int, *, strict: bool) -> None:
        if count < 1:
            raise BadArgument(f"concurrency must be at least 1, not {count}")
        self._free = count
        self._strict = strict
        self._waiting: list[tuple[Slot, asyncio.Future[None]]] = []
        self._clock = 0.0

    async def acquire(self, slot: Slot) -> None:
        """Wait for a free one."""
        if self._free > 0 and not self._waiting:
            self._free -= 1
            self._served(slot)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((slot, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()
            else:
                self._waiting.remove((slot, future))
            raise

    def release(self) -> None:
        """Give one back: to whoever is next."""
        self._free += 1
        if not self._waiting:
            return
        found = min(self._waiting, key=lambda w: w[0].rank if self._strict else max(w[0].spent, self._clock))
        self._waiting.remove(found)
        self._free -= 1
        self._served(found[0])
        found[1].set_result(None)

    def _served(self, slot: Slot) -> None:
        # One that slept does not come back with a claim to all the turns it did not want.
        self._clock = max(self._clock, slot.spent)
        slot.spent = max(slot.spent, self._clock - 1) + 1 / slot.weight


@dataclass
class Slot:
    """A subscription as `Slots` sees it."""

    rank: int
    weight: int
    spent: float = 0.0
