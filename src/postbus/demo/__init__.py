"""The demo: a small shop that proves what the bus promises, on a database of its own.

Orders are written in transactions, some of which are rolled back. Workers in processes of their own bill
them, analyse them, mail the customers and keep a mirror of the table from its changes. One worker is killed
in the middle of it. One order cannot be billed: it becomes a dead letter and is redriven once the cause is
gone. At the end the tables are compared.

Example:
    >>> from postbus import demo
    >>> demo.run(dsn).wrong  # doctest: +SKIP
    []
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg

from postbus import engine
from postbus.demo import _check, _shop
from postbus.demo._result import Progress, Result
from postbus.demo._staff import Staff
from postbus.engine import Connection

__all__ = ["Progress", "Result", "run"]

_PATIENCE = 60.0  # a stage that takes longer has failed, and the checks will say what is missing
_KILL_AT = 0.25  # of the bills written


def run(dsn: str, watch: Callable[[Progress], None] = lambda progress: None) -> Result:
    """Install the engine into an empty database and play the demo; `watch` hears how far it is."""
    begun = time.monotonic()
    result = Result()
    with psycopg.connect(dsn, autocommit=True) as conn:
        engine.install(conn)
        _shop.set_up(conn)
        with Staff(dsn) as staff:
            staff.hire("worker-1")
            staff.hire("worker-2")

            def look(stage: str) -> Progress:
                progress = _look(conn, stage, result)
                watch(progress)
                return progress

            def halfway() -> bool:
                billed = look("orders come in, two workers are at it").billed
                return billed >= _KILL_AT * _shop.EVENTS and _shop.in_hand(conn, "worker-1") > 0

            with _shop.writing(dsn, result) as writers:
                _until(halfway)
                staff.kill("worker-1")
                killed = time.monotonic()
                result.taken_over = _shop.in_hand(conn, "worker-1")
                staff.hire("worker-3")
                takeover = "worker-1 was killed, the others take over"
                _until(lambda: look(takeover) and not _shop.in_hand(conn, "worker-1"))
                result.recovery = time.monotonic() - killed
                _until(lambda: look("the rest comes in") and writers.done())
            _until(lambda: look("all but one order can be billed").settled(result))
            result.dead_letters = _shop.dead_letters(conn)
            result.redriven = _shop.mend_and_redrive(conn)
            stage = "the cause is gone, the dead letter is redriven"
            _until(lambda: look(stage).billed >= result.published)
        result.seconds = time.monotonic() - begun
        _check.check(conn, result)
    return result


def _look(conn: Connection, stage: str, result: Result) -> Progress:
    row = conn.execute(
        "select (select count(*) from billed), (select count(*) from analysed),"
        " (select count(*) from mailed), (select count(*) from mirrored),"
        " (select count(*) from postbus.dead_letters('orders', 'billing'))"
    ).fetchone()
    assert row is not None
    return Progress(stage, result.committed + result.rolled_back, *row)


def _until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.05)
