"""What is refused: at the decorator where that is possible, else when the worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from postbus import BadArgument, Bus, Message, NotFound, Worker
from tests.worker.conftest import Start


@pytest.mark.parametrize("kind", ["queue", "stream", "group"])
def test_unknown_names(worker: Worker, bus: Bus, start: Start, kind: str) -> None:
    bus.stream("there", create=True)

    async def handle(m: Message[Any]) -> None: ...

    if kind == "queue":
        worker.queue("nowhere")(handle)
    elif kind == "stream":
        worker.stream("nowhere", group="g")(handle)
    else:
        worker.stream("there", group="nowhere", create=False)(handle)
    with pytest.raises(NotFound, match="nowhere") as caught:
        start(worker)
    assert caught.value.hint, "names the remedy"


async def one(m: Message[Any]) -> None: ...
def plain(m: Message[Any]) -> None: ...
async def two(m: Message[Any], conn: Any) -> None: ...
async def none() -> None: ...
def generator(m: Message[Any]) -> Any:
    yield m


@pytest.mark.parametrize(
    ("function", "options", "complaint"),
    [
        (one, {"concurrency": 0}, "concurrency must be at least 1"),
        (one, {"weight": 0}, "weight must be at least 1"),
        (one, {"prefetch": 0}, "prefetch must be at least 1"),
        (one, {"max_attempts": 0}, "max_attempts must be at least 1"),
        (one, {"lease": 0}, "lease must be above 0"),
        (one, {"rate": -1}, "rate must be above 0"),
        (one, {"timeout": 0}, "timeout must be above 0"),
        (one, {"burst": 3}, "burst goes with rate"),
        (one, {"process": True}, "plain function"),
        (one, {"max_size": 3}, "without create=True: max_size"),
        (one, {"transactional": True}, "must take the message and a connection"),
        (two, {}, "must take the message"),
        (none, {}, "must take the message"),
        (generator, {}, "is a generator"),
        (two, {"transactional": True, "manual_ack": True}, "manual_ack"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    worker: Worker, function: Any, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(BadArgument, match=complaint) as caught:
        worker.queue("emails", **options)(function)
    assert "'emails'" in str(caught.value)


def test_two_handlers_for_the_same_messages(worker: Worker, start: Start) -> None:
    worker.queue("q")(one)
    worker.queue("q")(plain)
    with pytest.raises(BadArgument, match="another handler is for all messages"):
        start(worker)


def test_no_handlers(worker: Worker, start: Start) -> None:
    with pytest.raises(BadArgument, match="no handlers"):
        start(worker)


def test_lambda_in_another_process(worker: Worker, bus: Bus, start: Start) -> None:
    bus.queue("q", create=True)
    worker.queue("q", process=True)(lambda m: None)
    with pytest.raises(BadArgument, match="top level"):
        start(worker)
