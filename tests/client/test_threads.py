"""One bus in many threads, or in many tasks."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from typing import Any

from postbus import AsyncBus, Bus
from tests.conftest import Database


def test_one_bus_in_eight_threads(db: Database) -> None:
    """Each sends and receives; some by loops, some by single calls; some leave their loops early."""
    each = 150
    with Bus(db.dsn, pool_size=6) as bus:
        queue = bus.queue("emails", create=True, backoff=0, max_attempts=100)
        seen: Counter[int] = Counter()
        lock = threading.Lock()
        failures: list[BaseException] = []
        done = threading.Event()

        def note(payload: int) -> None:
            with lock:
                seen[payload] += 1
                if len(seen) == 8 * each:
                    done.set()

        def work(me: int) -> None:
            try:
                for n in range(0, each, 10):
                    first = me * each + n
                    queue.send_batch(list(range(first, first + 5)))
                    for m in range(first + 5, first + 10):
                        queue.send(m)
                    consume(me, n)
                while not done.is_set():
                    consume(me, 0)
            except BaseException as exc:
                failures.append(exc)
                done.set()
                raise

        def consume(me: int, n: int) -> None:
            if me % 4 == 0:
                for m in queue.receive(max=20):
                    note(m.payload)
            elif me % 4 == 1:
                for m in queue.messages(wait=0, max=10):
                    note(m.payload)
            elif me % 4 == 2:
                for count, m in enumerate(queue.messages(wait=0, max=10)):
                    if count == 7:
                        break
                    note(m.payload)
            else:
                for batch in queue.batches(wait=0, max=10):
                    for m in batch:
                        note(m.payload)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(90)
        finally:
            sys.setswitchinterval(interval)
        assert not any(thread.is_alive() for thread in threads)
        assert failures == []
        # A message whose loop was left is not noted; everything that was noted was acked.
        assert set(seen) == set(range(8 * each))
        assert set(seen.values()) == {1}
        assert queue.peek() == []


def test_one_bus_in_many_tasks(db: Database) -> None:
    async def main() -> Counter[int]:
        seen: Counter[int] = Counter()
        async with AsyncBus(db.dsn, pool_size=4) as bus:
            queue = await bus.queue("emails", create=True)

            async def produce(me: int) -> None:
                for n in range(20):
                    await queue.send(me * 20 + n)

            async def consume() -> None:
                async for m in queue.messages(wait=0.5, max=10):
                    seen[m.payload] += 1
                    await asyncio.sleep(0)

            await asyncio.gather(*(produce(n) for n in range(20)), *(consume() for _ in range(5)))
        return seen

    seen = asyncio.run(main())
    assert seen == Counter(range(400))


def test_loops_left_in_cycles_are_collected(db: Database) -> None:
    """The collector may come in the middle of anything that the client does, in any of its threads."""
    import gc

    with Bus(db.dsn) as bus:
        queue = bus.queue("emails", create=True, backoff=0, max_attempts=1000)
        queue.send_batch(list(range(500)))
        threshold = gc.get_threshold()
        gc.set_threshold(30)
        try:
            for _ in range(40):
                cycle: list[Any] = []
                messages = queue.messages(max=2)
                cycle += [cycle, messages]
                next(iter(messages))
        finally:
            gc.set_threshold(*threshold)
        del cycle, messages
        gc.collect()
    rows = db.connect().execute("select distinct state from postbus.peek('emails', max => 1000)").fetchall()
    assert rows == [("ready",)]
