"""Messages that are finished by their own verbs, while a loop or a worker has them in hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postbus.client._message import Message
from postbus.errors import LeaseLost


def holders(messages: list[Message[Any] | str]) -> list[tuple[Any, str]]:
    """The consumers that look after messages, each with a receipt."""
    found = [(getattr(m, "_consumer", None), m) for m in messages]
    return [(c, m.receipt) for c, m in found if c is not None and isinstance(m, Message)]


def transaction_of(messages: list[Message[Any] | str], conn: object | None) -> object | None:
    """What was taken in a transaction is finished there, unless another connection is given."""
    if conn is None:
        return next((c.conn for c, _ in holders(messages) if c.conn is not None), None)
    return conn


@contextmanager
def ending(messages: list[Message[Any] | str], *, goes_back: bool) -> Iterator[list[str]]:
    """Around what tells the database. Afterwards they are nobody's in this process, if that went well.

    Gives the receipts of those that have to be released before, to keep the order.
    """
    held = holders(messages)
    named = {receipt for _, receipt in held}
    behind = [r for c, receipt in held for r in c.finishing(receipt, goes_back=goes_back)]
    try:
        yield [r for r in behind if r not in named]
    except BaseException as exc:
        for consumer, receipt in held:
            if isinstance(exc, LeaseLost) and len(messages) == 1:
                consumer.forget(receipt)
            else:
                consumer.not_finished(receipt)
        raise
    for consumer, receipt in held:
        consumer.forget(receipt)
