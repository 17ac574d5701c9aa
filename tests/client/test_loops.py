"""Consuming as iteration: what becomes of a message when its body is left, one way or another."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from postbus import AsyncBus, BadArgument, Bus, NotFound, PostbusError, Queue
from tests.client.conftest import count, eventually, fail, in_flight, opened, raises
from tests.conftest import Database


@pytest.fixture
def queue(bus: Bus) -> Queue[Any]:
    return bus.queue("emails", create=True, backoff=0, max_attempts=3)


def waiting(queue: Queue[Any]) -> list[tuple[Any, int]]:
    """Payloads and attempts of what is left, once all of it has been given back."""
    query = "select payload::json, attempt, state from postbus.peek(%s::text, max => 1000)"
    left: list[Any] = []

    def given_back() -> bool:
        left[:] = queue.bus.fetch(query, (queue.name,))
        return all(state != "in_flight" for _, _, state in left)

    eventually(given_back)
    return sorted((payload, attempt) for payload, attempt, _ in left)


def reason(db: Database) -> str:
    return str(db.connect().execute("select max(reason) from postbus.peek('emails')").fetchall()[0][0])


def test_leaving_the_body_acks(queue: Queue[Any], db: Database) -> None:
    queue.send_batch(list(range(500)))
    seen = []
    for m in queue.messages(wait=0, max=50):
        seen.append(m.payload)
        if m.payload == 400:
            # All but the last few are settled long before the end.
            eventually(lambda: count(db, "select count(*) from postbus.peek('emails', max => 1000)") <= 110)
    assert seen == list(range(500))
    assert queue.peek() == []


def test_the_last_one_is_acked_at_the_end(queue: Queue[Any]) -> None:
    queue.send(1)
    assert [m.payload for m in queue.messages(wait=0)] == [1]
    assert queue.peek() == []


def test_acked_while_the_loop_waits_for_more(queue: Queue[Any], another: Callable[..., Bus]) -> None:
    other = another().queue("emails")
    queue.send(1)
    done = threading.Event()

    def consume() -> None:
        for m in queue.messages():
            if m.payload == "end":
                done.set()
                return

    thread = threading.Thread(target=consume)
    thread.start()
    eventually(lambda: other.peek() == [])
    other.send("end")
    assert done.wait(20)
    thread.join()


def test_queue_is_iterable_itself(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3])
    seen = []
    for m in queue:
        seen.append(m.payload)
        if m.payload == 3:
            m.ack()
            break
    assert seen == [1, 2, 3]
    assert waiting(queue) == []


def test_break_gives_back(queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3])
    for m in queue.messages():
        if m.payload == 2:
            break
    # 1 is done; 2 was begun and comes again; 3 was not begun.
    assert waiting(queue) == [(2, 1), (3, 0)]
    assert reason(db) == "the loop was left"


def test_break_in_a_with_block_acks(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3])
    with queue.messages() as messages:
        for m in messages:
            if m.payload == 2:
                break
    assert waiting(queue) == [(3, 0)]


def test_exception_gives_back(queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3])

    def work() -> None:
        for m in queue.messages():
            if m.payload == 2:
                fail()

    with pytest.raises(ZeroDivisionError):
        work()
    gc.collect()  # the traceback holds the loop
    assert waiting(queue) == [(2, 1), (3, 0)]


def test_exception_in_a_with_block_nacks_with_the_reason(queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3])
    with raises(ZeroDivisionError), queue.messages() as messages:
        for m in messages:
            if m.payload == 2:
                fail()
    assert waiting(queue) == [(2, 1), (3, 0)]
    assert reason(db) == "ZeroDivisionError: division by zero"


def test_interruption_is_no_failure_that_waits(bus: Bus, db: Database) -> None:
    slow = bus.queue("slow", create=True, backoff=3600)
    slow.send_batch([1, 2])
    with raises(KeyboardInterrupt), slow.messages() as messages:
        for _ in messages:
            raise KeyboardInterrupt
    assert sorted((m.payload, m.attempt) for m in slow.receive(max=2).messages) == [(1, 2), (2, 1)]


def test_exceptions_up_to_max_attempts(queue: Queue[Any]) -> None:
    queue.send(1)
    for _ in range(3):
        with raises(RuntimeError), queue.messages(wait=5) as messages:
            for _ in messages:
                raise RuntimeError("no\0 good")
    [letter] = queue.dead_letters()
    assert (letter.attempt, letter.reason) == (3, "RuntimeError: no\\0 good")


def test_generators_end_with_their_loop(queue: Queue[Any]) -> None:
    def payloads() -> Any:
        for m in queue.messages():
            yield m.payload

    queue.send_batch([1, 2, 3])
    numbers = payloads()
    assert [next(numbers), next(numbers)] == [1, 2]
    numbers.close()
    assert waiting(queue) == [(2, 1), (3, 0)]


def test_verbs_inside_the_loop(queue: Queue[Any], db: Database) -> None:
    queue.send_batch(["ack", "nack", "later", "dead", "release", "plain"])
    seen: list[tuple[str, int, Any]] = []
    for m in queue.messages(wait=0):
        seen.append((m.payload, m.attempt, m.state))
        if m.attempt > 1 or seen.count(seen[-1]) > 1:
            continue
        if m.payload == "ack":
            m.ack()
        elif m.payload == "nack":
            m.nack(delay=0, reason="once more", state={"n": 1})
        elif m.payload == "later":
            m.nack(delay=3600)
        elif m.payload == "dead":
            m.dead_letter("no good")
        elif m.payload == "release":
            m.release()
        elif m.payload == "plain":
            m.extend(60)
    assert sorted(seen, key=str) == [
        ("ack", 1, None),
        ("dead", 1, None),
        ("later", 1, None),
        ("nack", 1, None),
        ("nack", 2, {"n": 1}),
        ("plain", 1, None),
        ("release", 1, None),
        ("release", 1, None),
    ]
    assert waiting(queue) == [("later", 1)]
    assert [d.payload for d in queue.dead_letters()] == ["dead"]


def test_verbs_of_the_bus_inside_the_loop(
    bus: Bus, queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    queue.send_batch(list(range(6)))
    with caplog.at_level(logging.INFO, "postbus"):
        for batch in queue.batches(wait=0, max=6):
            if len(batch) == 6:
                bus.ack(batch[0])
                bus.ack([batch[1], batch[2]])
                bus.nack([batch[3]], delay=3600)
                bus.dead_letter(batch[4:5])
    assert waiting(queue) == [(3, 1)]
    assert caplog.messages == []


def test_verb_that_fails_leaves_the_message_to_the_loop(queue: Queue[Any]) -> None:
    queue.send(1)
    for m in queue.messages(wait=0):
        with pytest.raises(PostbusError, match="state"):
            m.nack(state="x" * 100_000)
    assert waiting(queue) == []


def test_wait_zero_ends_at_once_when_empty(queue: Queue[Any]) -> None:
    began = time.monotonic()
    assert list(queue.messages(wait=0)) == []
    assert time.monotonic() - began < 5


def test_wait_zero_sees_what_its_body_has_sent(queue: Queue[Any]) -> None:
    """A look that began before the send does not end the loop."""
    queue.send(0)
    seen = []
    for m in queue.messages(wait=0):
        seen.append(m.payload)
        if m.payload < 200:
            queue.send(m.payload + 1)
    assert seen == list(range(201))


def test_wait_some_time(queue: Queue[Any], another: Callable[..., Bus]) -> None:
    other = another().queue("emails")
    timer = threading.Timer(0.2, lambda: other.send("late"))
    timer.start()
    began = time.monotonic()
    assert [m.payload for m in queue.messages(wait=0.8)] == ["late"]
    assert time.monotonic() - began >= 1.0
    timer.join()


def test_loop_that_has_ended_stays_so(queue: Queue[Any]) -> None:
    messages = queue.messages(wait=0)
    assert list(messages) == []
    queue.send(1)
    assert list(messages) == []
    messages.close()


def test_close_in_the_body(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3])
    messages = queue.messages()
    seen = []
    for m in messages:
        seen.append(m.payload)
        if m.payload == 2:
            messages.close()
    assert seen == [1, 2]
    assert waiting(queue) == [(3, 0)]


def test_batches(queue: Queue[Any]) -> None:
    queue.send_batch(list(range(25)))
    sizes = []
    seen = []
    for batch in queue.batches(max=10, wait=0):
        sizes.append(len(batch))
        seen += [m.payload for m in batch]
        if batch[0].payload == 10:
            batch[3].dead_letter("one of them")
    assert seen == list(range(25))
    assert max(sizes) <= 10
    assert len(sizes) <= 6
    assert waiting(queue) == []
    assert [d.payload for d in queue.dead_letters()] == [13]


def test_batch_that_fails(queue: Queue[Any]) -> None:
    queue.send_batch(list(range(9)))
    with raises(ZeroDivisionError), queue.batches(max=3, prefetch=6) as batches:
        for batch in batches:
            if batch[0].payload == 3:
                fail()
    assert waiting(queue) == [(3, 1), (4, 1), (5, 1), (6, 0), (7, 0), (8, 0)]


def test_receive_with_an_exception(queue: Queue[Any], db: Database) -> None:
    queue.send_batch([1, 2, 3])
    with raises(ZeroDivisionError), queue.receive(max=3) as batch:
        for m in batch:
            if m.payload == 2:
                fail()
    assert waiting(queue) == [(2, 1), (3, 0)]
    assert reason(db) == "ZeroDivisionError: division by zero"


def test_receive_with_a_break(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2, 3])
    for m in queue.receive(max=3):
        if m.payload == 2:
            break
    assert waiting(queue) == [(2, 1), (3, 0)]


def test_receive_that_nobody_loops_over(queue: Queue[Any], db: Database) -> None:
    """Its messages were perhaps taken for their verbs: they stay on their leases."""
    queue.send_batch([1, 2])
    batch = queue.receive(max=2)
    del batch
    gc.collect()
    assert in_flight(db, "emails") == 2


def test_with_block_around_a_receive_that_nobody_loops_over(queue: Queue[Any]) -> None:
    queue.send_batch([1, 2])
    with queue.receive(max=2):
        pass
    assert waiting(queue) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("wrong", [{"max": 0}, {"prefetch": 0}, {"lease": 0}, {"lease": -1.5}, {"wait": -1}])
def test_wrong_arguments(queue: Queue[Any], wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    for loop in (queue.messages, queue.batches):
        with pytest.raises(BadArgument, match=name):
            loop(**wrong)


def test_queue_that_is_dropped_under_the_loop(bus: Bus, db: Database) -> None:
    gone = bus.queue("gone", create=True)
    gone.send(1)
    with raises(NotFound, match="gone"):
        for _ in gone.messages():
            db.connect().execute("select postbus.drop_queue('gone', true)")


def test_closing_the_bus_ends_loops_and_gives_back(kind: str, db: Database) -> None:
    begun = threading.Event()
    go_on = threading.Event()
    seen = []

    def consume(queue: Queue[Any]) -> None:
        for m in queue.messages():
            seen.append(m.payload)
            begun.set()
            assert go_on.wait(20)

    with opened(kind, db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        queue.send_batch([1, 2, 3])
        thread = threading.Thread(target=consume, args=(queue,))
        thread.start()
        assert begun.wait(20)
        bus.close()
        assert in_flight(db, "emails") == 1  # what is in hand stays on its lease
        go_on.set()
        thread.join(20)
        assert not thread.is_alive()
    assert seen == [1]
    rows = db.connect().execute("select payload, attempt from postbus.peek('emails', 'ready')").fetchall()
    assert rows == [("2", 0), ("3", 0)]


def test_two_loops_share(queue: Queue[Any]) -> None:
    queue.send_batch(list(range(200)))
    seen: list[int] = []

    def consume() -> None:
        seen.extend(m.payload for m in queue.messages(wait=0.5, max=10))

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(200))


# Only where there is an event loop


def test_cancelled_body(db: Database) -> None:
    async def main() -> list[tuple[Any, int]]:
        async with AsyncBus(db.dsn) as bus:
            queue = await bus.queue("emails", create=True, backoff=3600)
            await queue.send_batch([1, 2])
            begun = asyncio.Event()

            async def consume() -> None:
                async with queue.messages() as messages:
                    async for _ in messages:
                        begun.set()
                        await asyncio.sleep(60)

            task = asyncio.create_task(consume())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return sorted((m.payload, m.attempt) for m in (await queue.receive(max=2)).messages)

    assert asyncio.run(main()) == [(1, 2), (2, 1)]


def test_cancelled_while_it_closes(db: Database) -> None:
    """A second cancellation does not lose what the background tasks have still to tell."""

    async def main() -> None:
        async with AsyncBus(db.dsn) as bus:
            queue = await bus.queue("emails", create=True)
            await queue.send_batch([1, 2, 3])
            messages = queue.messages()
            async for m in messages:
                if m.payload == 2:
                    break
            closing = asyncio.create_task(messages.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            for _ in range(500):
                left = await queue.peek()
                if [m.payload for m in left] == [3] and not await queue.peek(state="in_flight"):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError(left)

    asyncio.run(main())


def test_loop_that_is_left_when_its_event_loop_has_gone(db: Database) -> None:
    kept = []

    async def main() -> None:
        bus = AsyncBus(db.dsn)
        await bus.open()
        queue = await bus.queue("emails", create=True)
        await queue.send(1)
        messages = queue.messages()
        await messages.__anext__()
        kept.append(messages)
        await bus.close()

    asyncio.run(main())
    kept.clear()  # no error from __del__
    gc.collect()


def test_nothing_is_logged_about_good_work(queue: Queue[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "postbus"):
        queue.send_batch(list(range(100)))
        assert len(list(queue.messages(wait=0, max=10))) == 100
    assert [r for r in caplog.records if r.name == "postbus"] == []
