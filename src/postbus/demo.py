"""The demo: a small shop that proves what the bus promises, on a database of its own.

Example:
    >>> from postbus import demo
    >>> with psycopg.connect(dsn, autocommit=True) as conn:  # doctest: +SKIP
    ...     assert demo.run(conn).wrong == []
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from psycopg.rows import dict_row

from postbus import engine
from postbus.engine import Connection

TRANSACTIONS = 300
CUSTOMERS = 12
_ROLLED_BACK_EVERY = 5
_PAID_EVERY = 3
_FLAKY, _POISON = 41, 62
_ATTEMPTS = 3
_PATIENCE = 30.0

Row = dict[str, Any]


@dataclass
class Result:
    """What happened, and what should not have."""

    orders: set[int] = field(default_factory=set)
    published: int = 0
    rolled_back: int = 0
    changes: int = 0
    delivered: Counter[str] = field(default_factory=Counter)
    redelivered: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    redriven: int = 0
    checks: list[tuple[str, bool]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """The checks that failed."""
        return [name for name, held in self.checks if not held]


def run(conn: Connection, say: Callable[[str], None] = lambda text: None) -> Result:
    """Install the engine into an empty database and play the demo; `say` hears what is going on."""
    begun = time.monotonic()
    result = Result()
    say("installing the engine")
    engine.install(conn)
    _set_up(conn)
    say(f"writing orders in {TRANSACTIONS} transactions, every {_ROLLED_BACK_EVERY}th is rolled back")
    _write(conn, result)
    say("billing reads by key, and fails now and then")
    billed = _bill(conn, result)
    say("analytics reads everything in one order")
    analysed = [m for batch in _batches(conn, "orders", "analytics", result) for m in _acked(conn, batch)]
    say("a mirror follows the changes of the table")
    mirror = _mirror(conn, result)
    say("a queue sends e-mails, one at a time to each customer")
    mailed = _mail(conn, result)
    _check(conn, result, billed, analysed, mirror)
    _check_mail(result, mailed, analysed)
    result.seconds = time.monotonic() - begun
    return result


def _set_up(conn: Connection) -> None:
    conn.execute("create table orders (id int primary key, customer text not null, status text not null)")
    conn.execute("select postbus.create_stream('orders', '{\"lanes\": 4}')")
    conn.execute("select postbus.create_stream('order_changes', '{\"lanes\": 4}')")
    for stream, group, options in (
        ("orders", "billing", {"ordering": "key", "max_attempts": _ATTEMPTS}),
        ("orders", "analytics", {"ordering": "stream"}),
        ("order_changes", "mirror", {"ordering": "key"}),
    ):
        conn.execute("select postbus.create_group(%s, %s, %s::jsonb)", (stream, group, json.dumps(options)))
    conn.execute("select postbus.capture('orders'::regclass, 'order_changes')")
    # Every payment is a job too: it goes into the queue in the transaction that publishes it.
    conn.execute("select postbus.create_queue('emails')")
    conn.execute("select postbus.set_key_policy('emails', concurrency => 1)")
    conn.execute("select postbus.bind('emails', 'order.paid', 'orders')")


class _ChangedMindError(Exception):
    """Rolls a transaction back."""


def _write(conn: Connection, result: Result) -> None:
    for number in range(1, TRANSACTIONS + 1):
        try:
            with conn.transaction():
                events, changes = _order(conn, number)
                if number % _ROLLED_BACK_EVERY == 0:
                    raise _ChangedMindError
        except _ChangedMindError:
            result.rolled_back += 1
        else:
            result.orders.add(number)
            result.published += events
            result.changes += changes


def _order(conn: Connection, number: int) -> tuple[int, int]:
    """One order: rows and events, together or not at all. Returns how many events and row changes."""
    customer = f"customer-{number % CUSTOMERS}"
    publish = "select postbus.publish('orders', %s::jsonb, type => %s, key => %s)"
    payload = json.dumps({"order": number})
    conn.execute("insert into orders values (%s, %s, 'new')", (number, customer))
    conn.execute(publish, (payload, "order.created", customer))
    if number % _PAID_EVERY:
        return 1, 1
    conn.execute("update orders set status = 'paid' where id = %s", (number,))
    conn.execute(publish, (payload, "order.paid", customer))
    return 2, 2


def _batches(conn: Connection, stream: str, group: str, result: Result) -> Iterator[list[Row]]:
    """Batches of a group until it has nothing pending, waiting or in flight."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with conn.cursor(row_factory=dict_row) as cursor:
            batch = cursor.execute("select * from postbus.consume(%s, %s, 50)", (stream, group)).fetchall()
        if batch:
            result.redelivered[group] += sum(m["attempt"] > 1 for m in batch)
            yield batch
            continue
        query = """select waiting + in_flight from postbus.list_groups() where stream = %s and "group" = %s"""
        if conn.execute(query, (stream, group)).fetchone() == (0,):
            return
        time.sleep(0.02)


def _acked(conn: Connection, batch: list[Row]) -> list[Row]:
    if batch:
        conn.execute("select postbus.ack(%s::text[])", ([m["receipt"] for m in batch],))
    return batch


def _bill(conn: Connection, result: Result) -> list[Row]:
    """Bill every order. One fails once; one fails for good, becomes a dead letter and is redriven."""
    billed: list[Row] = []
    for batch in _batches(conn, "orders", "billing", result):
        failed = [m for m in batch if _fails(m)]
        if failed:
            nack = "select postbus.nack(%s::text[], interval '10 ms', 'card declined')"
            conn.execute(nack, ([m["receipt"] for m in failed],))
        # What comes after a failed message of its key went back with it, and comes again in order.
        first = {m["key"]: m["id"] for m in reversed(failed)}
        billed += _acked(conn, [m for m in batch if m["id"] < first.get(m["key"], m["id"] + 1)])
    row = conn.execute("select count(*) from postbus.dead_letters('orders', 'billing')").fetchone()
    result.dead_letters = row[0] if row else 0
    row = conn.execute("select postbus.redrive('orders', \"group\" => 'billing')").fetchone()
    result.redriven = row[0] if row else 0
    for batch in _batches(conn, "orders", "billing", result):
        billed += _acked(conn, batch)
    return billed


def _fails(m: Row) -> bool:
    if m["type"] != "order.created":
        return False
    number: int = json.loads(m["payload"])["order"]
    return number == _POISON or (number == _FLAKY and m["attempt"] == 1)


def _mirror(conn: Connection, result: Result) -> dict[int, Row]:
    """Rebuild the table from its changes alone."""
    mirror: dict[int, Row] = {}
    for batch in _batches(conn, "order_changes", "mirror", result):
        for m in _acked(conn, batch):
            change = json.loads(m["payload"])
            mirror[change["key"]["id"]] = change["after"]
            result.delivered["mirror"] += 1
    return mirror


def _mail(conn: Connection, result: Result) -> list[list[Row]]:
    """Take what is ready again and again until the queue is empty; one e-mail bounces and comes again."""
    rounds: list[list[Row]] = []
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with conn.cursor(row_factory=dict_row) as cursor:
            batch = cursor.execute("select * from postbus.receive('emails', 50)").fetchall()
        if not batch:
            if conn.execute("select postbus.next_due('emails')").fetchone() == (None,):
                return rounds
            time.sleep(0.01)
            continue
        bounced = [m["receipt"] for m in batch if not result.redelivered["emails"] and m is batch[0]]
        if bounced:
            conn.execute("select postbus.nack(%s::text[], interval '20 ms', 'mailbox busy')", (bounced,))
            result.redelivered["emails"] += 1
        rounds.append(_acked(conn, [m for m in batch if m["receipt"] not in bounced]))
        result.delivered["emails"] += len(rounds[-1])
    return rounds


def _check_mail(result: Result, mailed: list[list[Row]], analysed: list[Row]) -> None:
    def paid(messages: list[Row]) -> list[tuple[str, int]]:
        numbered = ((m["key"], json.loads(m["payload"])["order"]) for m in messages)
        return sorted(numbered, key=lambda x: x[0])

    sent = [m for batch in mailed for m in batch]
    one_at_a_time = all(len({m["key"] for m in batch}) == len(batch) for batch in mailed)
    events = [m for m in analysed if m["type"] == "order.paid"]
    result.checks += [
        # Sorted by customer, which leaves the order of each: the one that bounced has kept its place.
        ("every payment was mailed once, in the order of each customer", paid(sent) == paid(events)),
        ("no customer had two e-mails on the way", one_at_a_time and result.redelivered["emails"] == 1),
    ]


def _check(
    conn: Connection, result: Result, billed: list[Row], analysed: list[Row], mirror: dict[int, Row]
) -> None:
    result.delivered.update(billing=len(billed), analytics=len(analysed))

    def orders(messages: list[Row]) -> set[int]:
        return {json.loads(m["payload"])["order"] for m in messages}

    def once(messages: list[Row]) -> bool:
        return len({m["id"] for m in messages}) == len(messages) == result.published

    def in_order(messages: list[Row]) -> bool:
        ids = [m["id"] for m in messages]
        return ids == sorted(ids)

    # The redriven message came after later ones of its customer: that is what redriving means.
    regular = [m for m in billed if not _fails({**m, "attempt": 2})]
    keys = {m["key"] for m in regular}
    with conn.cursor(row_factory=dict_row) as cursor:
        table = {row["id"]: row for row in cursor.execute("select * from orders").fetchall()}
    seen = orders(billed) == orders(analysed) == result.orders == set(mirror)
    by_key = all(in_order([m for m in regular if m["key"] == k]) for k in keys)
    one_dead = result.dead_letters == result.redriven == 1
    result.checks += [
        ("billing finished every event exactly once", once(billed)),
        ("analytics finished every event exactly once", once(analysed)),
        ("nothing rolled back was seen", seen),
        ("billing kept the order of each customer", by_key),
        ("analytics kept one order for all", in_order(analysed)),
        ("what failed came again, and no more often", result.redelivered["billing"] == _ATTEMPTS),
        ("the poison order became the one dead letter, and was redriven", one_dead),
        ("every change of the table was captured once", result.delivered["mirror"] == result.changes),
        ("the mirror made from the changes equals the table", mirror == table),
    ]
