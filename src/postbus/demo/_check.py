"""Comparing what was written with what was done about it."""

from __future__ import annotations

from typing import Any, LiteralString

from postbus.demo import _shop
from postbus.demo._result import Result
from postbus.engine import Connection


def _one(conn: Connection, query: LiteralString, *params: object) -> Any:
    row = conn.execute(query, params).fetchone()
    return row[0] if row else None


def check(conn: Connection, result: Result) -> None:
    """Fill in the figures and the checks."""
    result.again = sum(
        _one(conn, query)
        for query in (
            "select count(*) from billed where attempt > 1",
            "select count(*) from analysed where attempt > 1",
            "select count(*) from mailed where attempt > 1",
            "select count(*) from mirrored where attempt > 1",
        )
    )
    result.handled = 2 * result.published + result.mails + result.changes
    result.latency = float(
        _one(conn, "select extract(epoch from percentile_cont(0.5) within group (order by lag)) from billed")
        or 0
    )
    n, mails, changes = result.published, result.mails, result.changes
    orders = sorted(_shop.ORDERS)
    in_order = _in_order(conn, "billed") and _in_order(conn, "analysed")
    result.checks += [
        ("billing has every event exactly once", _once(conn, "billed", n)),
        ("analytics has every event exactly once", _once(conn, "analysed", n)),
        ("nothing that was rolled back was seen", _seen(conn, "billed") == orders == _seen(conn, "analysed")),
        ("billing and analytics kept the order of each customer", in_order),
        (
            "every payment was mailed once, in the order of each customer",
            _once(conn, "mailed", mails) and _in_order(conn, "mailed"),
        ),
        ("every change of the table was captured once", _once(conn, "mirrored", changes)),
        ("the mirror made from the changes equals the table", _same(conn)),
        ("what the killed worker had in hand was done by others", result.taken_over > 0),
        ("one order became a dead letter, and was redriven", result.dead_letters == result.redriven == 1),
        ("nothing is left", _nothing_left(conn)),
    ]


def _once(conn: Connection, table: LiteralString, count: int) -> bool:
    query = "select count(*) = %s and count(distinct event) = %s from " + table  # noqa: S608
    return bool(_one(conn, query, count, count))


def _seen(conn: Connection, table: LiteralString) -> Any:
    return _one(conn, 'select array_agg(distinct "order" order by "order") from ' + table)  # noqa: S608


def _in_order(conn: Connection, table: LiteralString) -> bool:
    # The redriven order came after later ones of its customer: that is what redriving means.
    before = "lag(event) over (partition by customer order by seq)"
    query = (
        "select bool_and(last < event) from (select event, "  # noqa: S608
        + before
        + " as last from "
        + table
        + ' where "order" <> %s) x'
    )
    return bool(_one(conn, query, _shop.POISON))


def _same(conn: Connection) -> bool:
    query = "select 1 from orders o full join mirror m on o = m where o is null or m is null limit 1"
    return _one(conn, "select count(*) from orders") > 0 and _one(conn, query) is None


def _nothing_left(conn: Connection) -> bool:
    return bool(
        _one(conn, "select count(*) = 0 from postbus.in_flight()")
        and _one(conn, "select postbus.next_due('emails') is null")
    )
