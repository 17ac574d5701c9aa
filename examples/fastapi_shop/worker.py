"""What happens after the answer, in a process of its own: `python -m examples.fastapi_shop.worker`."""

import logging
from typing import Any

from postbus import Message, Worker

from .app import Confirmation

worker = Worker()  # on $POSTBUS_DSN, like the application


# If the mail server is down this raises, and the message comes again.
@worker.queue("confirmations", concurrency=8, timeout=30, max_attempts=5)
async def confirm(m: Message[Confirmation]) -> None:
    await send_mail(m.payload.email, f"We have your order {m.payload.order}.")


# The count and the note that this event is done commit together: each order is counted exactly once.
@worker.stream("orders", group="statistics", type="order.placed", start="earliest", transactional=True)
async def count(m: Message[dict[str, Any]], conn: Any) -> None:
    await conn.execute("create table if not exists sold (item text primary key, number int not null)")
    await conn.execute(
        "insert into sold values (%s, 1) on conflict (item) do update set number = sold.number + 1",
        (m.payload["item"],),
    )


async def send_mail(to: str, text: str) -> None:  # stands for a mail server
    logging.info("mail to %s: %s", to, text)


if __name__ == "__main__":
    worker.main()
