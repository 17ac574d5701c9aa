"""Backoff, rates and slots: the arithmetic."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from postbus import BadArgument
from postbus.worker import Backoff, GiveUp, Retry
from postbus.worker._policy import Bucket, Slot, Slots, outcome_of


def test_backoff_grows_up_to_a_bound() -> None:
    backoff = Backoff(first=2, factor=3, longest=50, jitter=0)
    assert [backoff.delay(attempt) for attempt in (1, 2, 3, 4, 5, 5000)] == [2, 6, 18, 50, 50, 50]


def test_jitter_goes_both_ways_and_no_further() -> None:
    backoff = Backoff(first=100, jitter=0.3)
    delays = [backoff.delay(1) for _ in range(500)]
    assert 70 <= min(delays) < 80
    assert 120 < max(delays) <= 130


@pytest.mark.parametrize(
    "options", [{"first": -1}, {"factor": 0.5}, {"longest": -1}, {"jitter": 2}, {"jitter": -0.1}]
)
def test_backoff_without_meaning(options: dict[str, float]) -> None:
    with pytest.raises(BadArgument, match="has no meaning"):
        Backoff(**options)


def test_outcomes() -> None:
    backoff = Backoff(first=8, jitter=0)

    def of(exc: Exception, attempt: int = 1, **options: object) -> tuple[object, ...]:
        given = {"backoff": None, "max_attempts": None, **options}
        return tuple(outcome_of(exc, attempt, **given))  # type: ignore[arg-type]

    assert of(ValueError("x")) == ("nack", None, "ValueError: x", None)
    assert of(ValueError("x"), 2, backoff=backoff) == ("nack", 16.0, "ValueError: x", None)
    assert of(ValueError("x"), 3, max_attempts=3) == ("dead_letter", None, "ValueError: x", None)
    assert of(Retry("r", delay=0.5, state=[1]), backoff=backoff) == ("nack", 0.5, "r", "[1]")
    assert of(Retry("r"), backoff=backoff) == ("nack", 8.0, "r", None)
    assert of(Retry("r", delay=1), 9, max_attempts=3) == ("dead_letter", None, "r", None)
    assert of(GiveUp("g"), backoff=backoff) == ("dead_letter", None, "g", None)
    assert of(Retry("r", delay=1e300))[1] == 10 * 365 * 86400
    assert of(Retry("r", state={1j}))[2].startswith("r (its state was dropped")  # type: ignore[attr-defined]


async def taken(bucket: Bucket, count: int) -> list[float]:
    """When each of so many waiters got its token."""
    began = time.monotonic()
    times: list[float] = []

    async def one() -> None:
        await bucket.take()
        times.append(time.monotonic() - began)

    await asyncio.gather(*(one() for _ in range(count)))
    return times


def test_bucket_gives_a_burst_and_then_its_rate() -> None:
    times = asyncio.run(taken(Bucket(rate=20, burst=5), 12))
    assert times[4] < 0.3, "five at once"
    for n, at in enumerate(times[5:], 1):
        assert n / 20 - 0.005 <= at, "then never faster"
    assert times[-1] < 7 / 20 + 1, "and hardly slower"


def test_bucket_does_not_save_more_than_its_burst() -> None:
    async def main() -> list[float]:
        bucket = Bucket(rate=20, burst=2)
        await taken(bucket, 2)
        await asyncio.sleep(0.5)  # ten tokens, of which it keeps two
        return await taken(bucket, 6)

    times = asyncio.run(main())
    assert times[5] > 4 / 20 - 0.005


async def turns(slots: Slots, waiters: list[Slot], count: int) -> list[int]:
    """The ranks of those who got a turn, when everybody always wants one."""
    order: list[int] = []

    async def worker(slot: Slot) -> None:
        while len(order) < count:
            await slots.acquire(slot)
            order.append(slot.rank)
            await asyncio.sleep(0)
            slots.release()

    await asyncio.gather(*(worker(slot) for slot in waiters for _ in range(3)))
    return order[:count]


def test_strict_slots_serve_the_first_as_long_as_it_wants() -> None:
    order = asyncio.run(turns(Slots(2, strict=True), [Slot(1, 1), Slot(0, 1), Slot(2, 1)], 100))
    assert Counter(order[5:])[0] > 90


def test_weighted_slots_take_turns() -> None:
    order = asyncio.run(turns(Slots(1, strict=False), [Slot(0, 1), Slot(1, 3), Slot(2, 6)], 1000))
    counts = Counter(order)
    assert abs(counts[0] - 100) < 15
    assert abs(counts[1] - 300) < 15
    assert abs(counts[2] - 600) < 15
    longest = max(len(run) for run in "".join(map(str, order)).split("0"))
    assert longest < 30, "and nobody waits for long"


def test_who_slept_has_no_claim_to_all_turns() -> None:
    async def main() -> list[int]:
        slots = Slots(1, strict=False)
        early, late = Slot(0, 1), Slot(1, 1)
        await turns(slots, [early], 500)
        return await turns(slots, [early, late], 100)

    assert 40 <= Counter(asyncio.run(main()))[0] <= 60


def test_cancelled_while_waiting_for_a_slot() -> None:
    async def main() -> None:
        slots = Slots(1, strict=True)
        first, second, third = (Slot(n, 1) for n in range(3))
        await slots.acquire(first)
        waiting = [asyncio.create_task(slots.acquire(s)) for s in (second, third)]
        await asyncio.sleep(0)
        slots.release()  # it is the second one's now, who does not want it any more
        waiting[0].cancel()
        async with asyncio.timeout(1):
            await waiting[1]

    asyncio.run(main())
