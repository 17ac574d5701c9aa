"""The shop: its tables, and those who write orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from postbus.client import Bus
from postbus.demo._result import Result
from postbus.engine import Connection

TRANSACTIONS = 1000
CUSTOMERS = 20
WRITERS = 3
RATE = 100  # orders a second, of each writer
ROLLED_BACK_EVERY = 5
PAID_EVERY = 3
FLAKY, POISON = 41, 62
ATTEMPTS = 3
LEASE = 2  # seconds: how long a dead worker is waited for

_NUMBERS = range(1, TRANSACTIONS + 1)
ORDERS = {n for n in _NUMBERS if n % ROLLED_BACK_EVERY}
EVENTS = sum(2 if n % PAID_EVERY == 0 else 1 for n in ORDERS)

_TABLES = """
create table orders (id int primary key, customer text not null, status text not null);
create table barred (customer_order int primary key);
create table billed (
  event bigint, seq bigserial, "order" int, customer text, attempt int, worker text, lag interval
);
create table analysed (event bigint, seq bigserial, "order" int, customer text, attempt int, worker text);
create table mailed (event bigint, seq bigserial, "order" int, customer text, attempt int, worker text);
create table mirrored (event bigint, attempt int);
create table mirror (id int primary key, customer text not null, status text not null);
"""


def set_up(conn: Connection) -> None:
    """Tables, streams, a queue; groups are made by the workers that read for them."""
    conn.execute(_TABLES)
    conn.execute("insert into barred values (%s)", (POISON,))
    conn.execute("select postbus.create_stream('orders', '{\"lanes\": 4}')")
    conn.execute("select postbus.create_stream('order_changes', '{\"lanes\": 4}')")
    conn.execute("select postbus.capture('orders'::regclass, 'order_changes')")
    # What was sent is kept, so that the report knows how long it took.
    conn.execute(
        "select postbus.create_queue('emails', %s::jsonb)", (f'{{"lease": {LEASE}, "on_ack": "archive"}}',)
    )
    # One e-mail at a time to each customer, in order.
    conn.execute("select postbus.set_key_policy('emails', concurrency => 1)")
    options = f'"lease": {LEASE}, "max_attempts": {ATTEMPTS}, "backoff": 0.05'
    for stream, group, ordering in (
        ("orders", "billing", "key"),
        ("orders", "analytics", "stream"),
        ("order_changes", "mirror", "key"),
    ):
        told = f'{{"ordering": "{ordering}", {options}}}'
        conn.execute("select postbus.create_group(%s, %s, %s::jsonb)", (stream, group, told))


class Writers:
    """Whoever writes orders."""

    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """Whether all have ended."""
        return all(f.done() for f in self._futures)

    def result(self) -> None:
        """Raise what went wrong."""
        for future in self._futures:
            future.result()


@contextmanager
def writing(dsn: str, result: Result) -> Iterator[Writers]:
    """Write all orders in the background."""
    lock = threading.Lock()
    with ThreadPoolExecutor(WRITERS) as pool, Bus(dsn, name="shop", pool_size=2) as bus:
        # A customer writes one order after the other.
        parts = [[n for n in _NUMBERS if n % CUSTOMERS % WRITERS == w] for w in range(WRITERS)]
        writers = Writers([pool.submit(_write, dsn, bus, part, result, lock) for part in parts])
        yield writers
        writers.result()


class _ChangedMindError(Exception):
    """Rolls a transaction back."""


def _write(dsn: str, bus: Bus, numbers: list[int], result: Result, lock: threading.Lock) -> None:
    orders, emails = bus.stream("orders"), bus.queue("emails")
    with psycopg.connect(dsn, autocommit=True) as conn:
        begun = time.monotonic()
        for n, number in enumerate(numbers):
            time.sleep(max(0, begun + n / RATE - time.monotonic()))
            paid = number % PAID_EVERY == 0
            try:
                with conn.transaction():
                    _order(conn, orders, emails, number, paid)
                    if number % ROLLED_BACK_EVERY == 0:
                        raise _ChangedMindError
            except _ChangedMindError:
                with lock:
                    result.rolled_back += 1
                continue
            with lock:
                result.committed += 1
                result.published += 2 if paid else 1
                result.changes += 2 if paid else 1
                result.mails += paid


def _order(conn: Connection, orders: Any, emails: Any, number: int, paid: bool) -> None:
    """One order: rows, events and a job, together or not at all."""
    customer = f"customer-{number % CUSTOMERS}"
    conn.execute("insert into orders values (%s, %s, 'new')", (number, customer))
    orders.publish({"order": number}, type="order.created", key=customer, conn=conn)
    if paid:
        conn.execute("update orders set status = 'paid' where id = %s", (number,))
        orders.publish({"order": number}, type="order.paid", key=customer, conn=conn)
        emails.send({"order": number, "subject": "Thank you"}, key=customer, conn=conn)


def in_hand(conn: Connection, worker: str) -> int:
    """How many messages are out with a worker."""
    query = "select coalesce(sum(messages), 0) from postbus.in_flight() where worker = %s"
    row = conn.execute(query, (worker,)).fetchone()
    return int(row[0]) if row else 0


def dead_letters(conn: Connection) -> int:
    """How many orders could not be billed."""
    row = conn.execute("select count(*) from postbus.dead_letters('orders', 'billing')").fetchone()
    return int(row[0]) if row else 0


def mend_and_redrive(conn: Connection) -> int:
    """Take the cause away, and send the dead letters back."""
    conn.execute("delete from barred")
    row = conn.execute("select postbus.redrive('orders', \"group\" => 'billing')").fetchone()
    return int(row[0]) if row else 0
