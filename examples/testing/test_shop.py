"""Tests with the fixtures of the pytest plugin."""

from datetime import UTC, datetime
from typing import Any

import pytest

from postbus import AsyncBus, Bus
from postbus.testing import Clock

from . import shop
from .shop import place_order, worker


@pytest.fixture(autouse=True)
def tables(bus: Bus) -> None:
    bus.queue("emails", create=True)
    bus.stream("orders", create=True)


def test_what_an_order_sends(bus: Bus, assert_sent: Any, assert_published: Any) -> None:
    place_order(bus, 1, "someone@example.com")
    assert_sent("emails", type="confirmation", payload={"to": "someone@example.com", "order": 1})
    assert_sent("emails", key="someone@example.com", count=2)
    assert_published("orders", type="order.placed", payload={"order": 1})


def test_the_worker(bus: Bus, drain: Any, assert_empty: Any) -> None:
    place_order(bus, 1, "someone@example.com")
    handled = drain(worker)
    assert {(h.message.source, h.outcome) for h in handled} == {("emails", "done"), ("orders", "done")}
    assert_empty("orders", group="billing")


def test_a_week_later(bus: Bus, clock: Clock, drain: Any, assert_empty: Any) -> None:
    place_order(bus, 1, "someone@example.com")
    drain(worker)
    clock.move(days=7)
    assert "survey" in {h.message.type for h in drain(worker)}
    assert_empty("emails")


def test_an_address_that_is_none(bus: Bus, drain: Any, dead_letters: Any) -> None:
    place_order(bus, 1, "nobody")
    drain(worker)
    [letter] = dead_letters("emails")
    assert (letter.payload["to"], letter.reason) == ("nobody", "not an address")


def test_retries(bus: Bus, clock: Clock, drain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(to: str) -> None:
        raise ConnectionError("no mail server")

    place_order(bus, 1, "someone@example.com")
    with monkeypatch.context() as patch:
        patch.setattr(shop, "deliver", broken)
        with pytest.raises(ConnectionError):
            drain(worker)
        clock.move(minutes=1)
        [second] = drain(worker, raises=False)
        assert isinstance(second.error, ConnectionError)
    clock.move(minutes=1)
    [third] = drain(worker)
    assert (third.message.attempt, third.outcome) == (3, "done")


def test_the_report_at_nine(clock: Clock, drain: Any) -> None:
    clock.set(datetime(2030, 1, 1, 8, 59, 59, tzinfo=UTC))
    drain(worker)  # the first time the worker runs, the schedule is made
    clock.move(minutes=1)
    assert {h.message.source for h in drain(worker)} == {"cron.report", "emails"}


@pytest.mark.anyio
async def test_with_asyncio(async_bus: AsyncBus, async_drain: Any) -> None:
    emails = await async_bus.queue("emails")
    await emails.send({"to": "someone@example.com"})
    [handled] = await async_drain(worker)
    assert handled.message.payload == {"to": "someone@example.com"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
