"""The fetching loop against answers that come late."""

from __future__ import annotations

import asyncio
from typing import Any

from postbus import AsyncBus, AsyncQueue
from postbus.client._async._consumer import AsyncConsumer
from postbus.client._async._iterate import AsyncMessages
from postbus.client._outcome import nack
from tests.conftest import Database


class Slow(AsyncQueue[Any]):
    """A queue whose answers can be held back on their way."""

    gate: asyncio.Event
    held = 0

    async def take(self, max: int, lease: float | None) -> list[tuple[Any, ...]]:
        rows = await super().take(max, lease)
        if not self.gate.is_set():
            self.held += 1
            await self.gate.wait()
        return rows


async def slow(bus: AsyncBus) -> Slow:
    queue = await bus.queue("emails", create=True)
    made = Slow(bus, queue.name, queue.codec_of("default"))
    made.gate = asyncio.Event()
    made.gate.set()
    return made


async def until(look: Any) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110 - it looks at something that sets no event
            await asyncio.sleep(0.005)


def test_a_look_that_began_before_the_send_does_not_end_the_loop(db: Database) -> None:
    async def main() -> None:
        async with AsyncBus(db.dsn) as bus:
            queue = await slow(bus)
            await queue.send(1)
            messages = AsyncMessages(queue, max=10, wait=0)
            m = await messages.__anext__()
            await m.ack()
            queue.gate.clear()
            # Nothing is on a lease, and this look finds the queue empty.
            assert messages._consumer is not None
            messages._consumer._nudge.set()
            await until(lambda: queue.held)
            await queue.send(2)
            following = asyncio.create_task(messages.__anext__())
            await asyncio.sleep(0.05)
            queue.gate.set()
            assert (await following).payload == 2
            await messages.close()

    asyncio.run(main())


def test_what_arrives_after_the_close_is_given_back(db: Database) -> None:
    async def main() -> None:
        async with AsyncBus(db.dsn) as bus:
            queue = await slow(bus)
            queue.gate.clear()
            await queue.send_batch([1, 2, 3])
            messages = AsyncMessages(queue, max=10)
            first = asyncio.create_task(messages.__anext__())
            await until(lambda: queue.held)
            closing = asyncio.create_task(messages.close())
            await asyncio.sleep(0.05)
            queue.gate.set()
            await closing
            first.cancel()
            assert [m.attempt for m in await queue.peek()] == [0, 0, 0]

    asyncio.run(main())


def test_settling_goes_on_after_abandon(db: Database) -> None:
    """A worker that ends lets its handlers finish: what they settle is told, and leases are kept."""

    async def main() -> None:
        async with AsyncBus(db.dsn) as bus, AsyncBus(db.dsn) as other:
            queue = await bus.queue("emails", create=True, backoff=0)
            await queue.send_batch([1, 2, 3])
            consumer = AsyncConsumer(queue, max=10, prefetch=10, lease=0.5)
            await consumer.start()
            one, two = await consumer.take(), await consumer.take()
            assert one is not None
            assert two is not None
            consumer.abandon()
            assert consumer.closing
            assert await consumer.take() is None
            theirs = await (await other.queue("emails")).receive(max=3, wait=1.5)
            assert [m.payload for m in theirs.messages] == [3]
            assert consumer.holds(one.receipt)
            assert consumer.settle(one.receipt)
            assert consumer.settle(two.receipt, nack(0, "not now"))
            assert not consumer.settle(two.receipt)
            await consumer.close()
            assert not consumer.settle(one.receipt)
            left = await queue.peek()
            assert sorted((m.payload, m.attempt) for m in left) == [(2, 1), (3, 1)]

    asyncio.run(main())


def test_whoever_is_at_work_on_what_was_lost_is_told(db: Database) -> None:
    async def main() -> None:
        async with AsyncBus(db.dsn) as bus:
            queue = await bus.queue("emails", create=True)
            await queue.send_batch([1, 2, 3])
            consumer = AsyncConsumer(queue, max=10, prefetch=10, lease=0.3)
            lost: list[set[str]] = []
            consumer.on_lost = lost.append  # type: ignore[method-assign, assignment]
            await consumer.start()
            one, two = await consumer.take(), await consumer.take()
            assert one is not None
            assert two is not None
            consumer.settle(two.receipt)
            await until(lambda: consumer.on_lease == 2)
            await queue.purge()
            await until(lambda: lost)
            assert lost == [{one.receipt}]  # three was not begun
            assert consumer.unanswered() < 5
            await consumer.close()

    asyncio.run(main())
