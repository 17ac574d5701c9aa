"""The application that the tests are about."""

from typing import Any

from postbus import Bus, Message, Worker
from postbus.worker import GiveUp

worker = Worker()


def place_order(bus: Bus, number: int, email: str) -> None:
    bus.queue("emails").send({"to": email, "order": number}, type="confirmation", key=email)
    bus.queue("emails").send({"to": email, "order": number}, type="survey", key=email, delay=7 * 24 * 3600)
    bus.stream("orders").publish({"order": number}, type="order.placed", key=email)


@worker.queue("emails", max_attempts=3)
def send_email(m: Message[dict[str, Any]]) -> None:
    if "@" not in m.payload["to"]:
        raise GiveUp("not an address")
    deliver(m.payload["to"])


@worker.stream("orders", group="billing", start="earliest", ordering="key")
async def bill(m: Message[dict[str, Any]]) -> None: ...


@worker.cron("0 9 * * *", queue="emails")
def report() -> dict[str, str]:
    return {"to": "owner@example.com"}


def deliver(to: str) -> None: ...
