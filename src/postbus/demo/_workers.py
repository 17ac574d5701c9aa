"""A worker of the shop, as a process: ``python -m postbus.demo._workers DSN NAME``.

Every handler writes its effect in the transaction that acks the message.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from postbus.client import Message
from postbus.demo import _shop
from postbus.worker import Retry, Worker


class Order(msgspec.Struct):
    """The payload of an event and of an e-mail."""

    order: int
    subject: str = ""


def make(dsn: str, name: str) -> Worker:
    """The worker with its handlers."""
    worker = Worker(dsn, name=name, grace=5)

    @worker.stream("orders", group="billing", concurrency=4, prefetch=40, transactional=True)
    async def bill(m: Message[Order], conn: Any) -> None:
        cursor = await conn.execute("select from barred where customer_order = %s", (m.payload.order,))
        if m.type == "order.created" and await cursor.fetchone() is not None:
            raise Retry("card declined")
        if m.payload.order == _shop.FLAKY and m.attempt == 1:
            raise ConnectionError("the bank did not answer")
        await conn.execute(
            'insert into billed (event, "order", customer, attempt, worker, lag)'
            " values (%s, %s, %s, %s, %s, clock_timestamp() - %s)",
            (m.id, m.payload.order, m.key, m.attempt, name, m.created_at),
        )

    @worker.stream("orders", group="analytics", prefetch=40, transactional=True)
    async def analyse(m: Message[Order], conn: Any) -> None:
        await conn.execute(
            'insert into analysed (event, "order", customer, attempt, worker) values (%s, %s, %s, %s, %s)',
            (m.id, m.payload.order, m.key, m.attempt, name),
        )

    @worker.stream("order_changes", group="mirror", concurrency=2, prefetch=40, transactional=True)
    async def mirror(m: Message[dict[str, Any]], conn: Any) -> None:
        row = m.payload["after"]
        await conn.execute(
            "insert into mirror values (%(id)s, %(customer)s, %(status)s) on conflict (id) do update"
            " set customer = excluded.customer, status = excluded.status",
            row,
        )
        await conn.execute("insert into mirrored values (%s, %s)", (m.id, m.attempt))

    @worker.queue("emails", concurrency=4, transactional=True)
    def mail(m: Message[Order], conn: Any) -> None:
        conn.execute(
            'insert into mailed (event, "order", customer, attempt, worker) values (%s, %s, %s, %s, %s)',
            (m.id, m.payload.order, m.key, m.attempt, name),
        )

    return worker


if __name__ == "__main__":
    logging.getLogger("postbus").setLevel(logging.ERROR)
    make(sys.argv[1], sys.argv[2]).main()
