"""drain runs the real worker, until there is nothing more that it could do."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pydantic
import pytest

from postbus import AsyncBus, BadArgument, Bus, Message, NotFound, Undecodable, Worker
from postbus.testing import Clock, Handled
from postbus.worker import GiveUp, Retry


def outcomes(handled: list[Handled]) -> list[tuple[Any, str]]:
    return [(h.message.payload, h.outcome) for h in handled]


@pytest.fixture
def emails(bus: Bus) -> Any:
    return bus.queue("emails", create=True, backoff="1 minute", max_attempts=3)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_everything_that_is_due(emails: Any, worker: Worker, drain: Any, assert_sent: Any) -> None:
    emails.send_batch(list(range(250)))
    emails.send("later", delay=3600)

    @worker.queue("emails", concurrency=4)
    def handle(m: Message[Any]) -> None: ...

    handled = drain(worker)
    assert sorted(outcomes(handled)) == [(n, "done") for n in range(250)]
    assert_sent("emails", payload="later", count=1)
    assert_sent("emails", count=1)
    assert drain(worker) == []


def test_what_handlers_send_to_each_other(bus: Bus, worker: Worker, drain: Any) -> None:
    first, second = bus.queue("first", create=True), bus.queue("second", create=True)
    stream = bus.stream("third", create=True)

    @worker.queue("first", transactional=True)
    def one(m: Message[int], conn: Any) -> None:
        second.send(m.payload + 1, conn=conn)

    @worker.queue("second")
    async def two(m: Message[int]) -> None:
        await (await worker.bus.stream("third")).publish(m.payload + 1)

    @worker.stream("third", group="all", ordering="none")
    def three(m: Message[int]) -> None:
        if m.payload < 12:
            first.send(m.payload + 1)

    first.send(0)
    stream.publish(1)  # before the group was made: not for it
    assert sorted(outcomes(drain(worker))) == [(n, "done") for n in range(15)]


@pytest.mark.parametrize("ordering", ["key", "stream", "none"])
def test_streams(bus: Bus, worker: Worker, drain: Any, assert_empty: Any, ordering: str) -> None:
    stream = bus.stream("orders", create=True, lanes=4)
    stream.publish_batch(list(range(300)), key=[f"key-{n % 7}" for n in range(300)])

    @worker.stream("orders", group="all", start="earliest", ordering=ordering, concurrency=3)
    async def handle(m: Message[int]) -> None: ...

    assert sorted(outcomes(drain(worker))) == [(n, "done") for n in range(300)]
    assert_empty("orders", group="all")


def test_failures_are_raised_when_all_is_done(emails: Any, worker: Worker, drain: Any) -> None:
    emails.send_batch([1, 2, 3])
    seen = []

    @worker.queue("emails")
    def handle(m: Message[int]) -> None:
        seen.append(m.payload)
        if m.payload < 3:
            raise ValueError(f"not {m.payload}")

    with pytest.raises(ValueError, match="not 1") as caught:
        drain(worker)
    assert seen == [1, 2, 3]
    assert caught.value.__notes__ == [
        "raised for message 1 of 'emails', outcome: retried",
        "also for message 2 of 'emails': ValueError: not 2",
    ]


def test_failures_can_be_reported(emails: Any, worker: Worker, drain: Any, clock: Clock) -> None:
    emails.send(1)

    @worker.queue("emails")
    def handle(m: Message[int]) -> None:
        raise ValueError("no")

    for outcome in ("retried", "retried", "dead"):  # the queue allows three attempts
        [handled] = drain(worker, raises=False)
        assert (handled.outcome, str(handled.error)) == (outcome, "no")
        clock.move(hours=1)
    assert drain(worker) == []


def test_all_attempts_in_one_drain(bus: Bus, worker: Worker, drain: Any) -> None:
    bus.queue("emails", create=True, backoff="0", max_attempts=3).send(1)

    @worker.queue("emails")
    def handle(m: Message[int]) -> None:
        raise ValueError("no")

    assert [h.outcome for h in drain(worker, raises=False)] == ["retried", "retried", "dead"]


def test_retry_and_give_up_are_wishes(emails: Any, worker: Worker, drain: Any, dead_letters: Any) -> None:
    emails.send_batch(["later", "never"])

    @worker.queue("emails")
    async def handle(m: Message[str]) -> None:
        if m.payload == "never":
            raise GiveUp("no")
        raise Retry("not now", delay=60)

    assert outcomes(drain(worker)) == [("later", "retried"), ("never", "dead")]
    assert [x.payload for x in dead_letters("emails")] == ["never"]


class Email(pydantic.BaseModel):
    to: str


def test_messages_that_no_handler_can_read(emails: Any, worker: Worker, drain: Any) -> None:
    emails.send({"to": "someone"})
    emails.send({"from": "someone"})

    @worker.queue("emails")
    def handle(m: Message[Email]) -> None: ...

    with pytest.raises(Undecodable, match="to"):
        drain(worker)
    emails.redrive()
    [handled] = drain(worker, raises=False)
    assert (handled.message.payload, handled.outcome) == ('{"from":"someone"}', "dead")


def test_what_waits_behind_a_failure(bus: Bus, worker: Worker, drain: Any, clock: Clock) -> None:
    """In a queue with order per key, and in streams, later messages wait; drain does not."""
    queue = bus.queue("emails", create=True, backoff="1 minute")
    queue.set_key_policy(concurrency=1)
    queue.send_batch([1, 2], key="k")
    streams = [bus.stream(name, create=True) for name in ("by_key", "in_order")]
    for stream in streams:
        stream.publish_batch([1, 2], key="k")
    broken = True

    def handle(m: Message[int]) -> None:
        if broken and m.payload == 1:
            raise ValueError("no")

    worker.queue("emails")(handle)
    worker.stream("by_key", group="all", start="earliest", ordering="key")(handle)
    worker.stream("in_order", group="all", start="earliest", ordering="stream")(handle)
    assert outcomes(drain(worker, raises=False, timeout=5)) == [(1, "retried")] * 3
    broken = False
    clock.move(hours=1)
    assert sorted(outcomes(drain(worker))) == [(1, "done")] * 3 + [(2, "done")] * 3


def test_messages_of_other_types_and_workers_stay(emails: Any, worker: Worker, drain: Any) -> None:
    emails.send("held")
    [held] = emails.receive(lease=600).messages
    emails.send("mine", type="a")
    emails.send("other", type="b")

    @worker.queue("emails", type="a")
    def handle(m: Message[str]) -> None: ...

    assert outcomes(drain(worker)) == [("mine", "done")]
    held.ack()


def test_a_paused_queue(bus: Bus, emails: Any, worker: Worker, drain: Any) -> None:
    emails.send(1)
    bus.fetch("select postbus.pause('emails')", ())

    @worker.queue("emails")
    def handle(m: Message[int]) -> None: ...

    assert drain(worker) == []


def test_schedules(worker: Worker, drain: Any, clock: Clock) -> None:
    times = []

    @worker.cron("0 9 * * *")
    def daily() -> None:
        times.append(clock.now().date())

    drain(worker)  # makes the schedule
    for _ in range(2):
        clock.move(days=1)
        [handled] = drain(worker)
        assert handled.message.source == "cron.daily"
    assert len(set(times)) == 2


def test_a_handler_that_does_not_end(emails: Any, worker: Worker, drain: Any) -> None:
    emails.send_batch([1, 2])
    end = threading.Event()

    @worker.queue("emails")
    def handle(m: Message[int]) -> None:
        if m.payload == 2:
            end.wait(30)

    try:
        with pytest.raises(TimeoutError, match=r"not drained after 0\.5 seconds: 1 handled, 1 at work"):
            drain(worker, timeout=0.5)
    finally:
        end.set()


def test_handlers_that_never_have_enough(bus: Bus, worker: Worker, drain: Any) -> None:
    queue = bus.queue("loop", create=True)
    queue.send(1)

    @worker.queue("loop")
    def handle(m: Message[int]) -> None:
        queue.send(m.payload + 1)

    with pytest.raises(TimeoutError, match="handled"):
        drain(worker, timeout=0.5)


def test_a_handler_with_a_timeout(emails: Any, worker: Worker, drain: Any) -> None:
    emails.send(1)
    end = threading.Event()

    @worker.queue("emails", timeout=0.1)
    def handle(m: Message[int]) -> None:
        end.wait(30)

    try:
        [handled] = drain(worker, raises=False)
        assert (handled.outcome, type(handled.error)) == ("retried", TimeoutError)
    finally:
        end.set()


def test_a_lease_that_ends_while_the_handler_runs(
    postbus_dsn: str, emails: Any, worker: Worker, drain: Any, clock: Clock
) -> None:
    emails.send(1)
    effects = []

    @worker.queue("emails", transactional=True)
    def handle(m: Message[int], conn: Any) -> None:
        effects.append(m.attempt)
        if m.attempt == 1:
            clock.move(hours=1)
            with psycopg.connect(postbus_dsn, autocommit=True) as other:
                other.execute("select from postbus.receive('emails', lease => '1 second')")
            clock.move(hours=1)

    # The other session has it now, or the worker itself, for the second time.
    first, *_, last = drain(worker, raises=False)
    assert (first.message.attempt, first.outcome, last.outcome) == (1, "lost", "done")
    assert effects[-1] > 1


def test_the_worker_is_as_before(emails: Any, postbus_dsn: str, drain: Any) -> None:
    worker = Worker("host=nowhere.invalid", name="mine", health=1, maintain=True)
    seen = []

    async def note(m: Message[Any], call_next: Any) -> None:
        seen.append((worker.name == "mine", worker.health_port, worker.dsn))
        await call_next(m)

    worker.use(note)

    @worker.queue("emails")
    def handle(m: Message[int]) -> None: ...

    before = dict(vars(worker))
    emails.send(1)
    assert len(drain(worker)) == 1
    assert seen == [(False, None, postbus_dsn)]
    assert vars(worker) == before


def test_a_queue_that_does_not_exist(worker: Worker, drain: Any) -> None:
    @worker.queue("nowhere")
    def handle(m: Message[int]) -> None: ...

    with pytest.raises(NotFound, match="nowhere"):
        drain(worker)


def test_a_worker_without_handlers(worker: Worker, drain: Any) -> None:
    with pytest.raises(BadArgument, match="no handlers"):
        drain(worker)


@pytest.mark.anyio
async def test_with_asyncio(async_bus: AsyncBus, worker: Worker, drain: Any, async_drain: Any) -> None:
    queue = await async_bus.queue("emails", create=True)

    @worker.queue("emails")
    async def handle(m: Message[int]) -> None:
        if m.payload < 3:
            await queue.send(m.payload + 1)  # on the loop of the test

    await queue.send(1)
    assert outcomes(await async_drain(worker)) == [(1, "done"), (2, "done"), (3, "done")]
    with pytest.raises(BadArgument, match="async_drain"):
        drain(worker)
