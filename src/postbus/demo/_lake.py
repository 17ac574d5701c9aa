"""The last act of the demo: what happened goes to a lake, and is looked at there, with Spark.

The stream of orders is archived, the captured table is mirrored, both are joined in Spark SQL, and a page
with plots is written. Only where the extra ``spark`` is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from postbus.demo import _shop
from postbus.engine import Connection

Progress = Callable[[int, int | None, str], None]

NEEDED = ("pyspark", "pyarrow", "deltalake", "matplotlib")
CHECKS = 4
_PER_STATUS = """
    select o.status, count(distinct o.id) as orders, count(*) as events
    from mirrored_orders o join events e on get_json_object(e.payload, '$.order') = o.id
    where e.stream = 'orders'
    group by o.status order by o.status
"""


@dataclass
class Lake:
    """What the lake got, and what Spark made of it.

    Attributes:
        archived: events.
        mirrored: rows of the mirror.
        files: of both tables, and their size in bytes.
        orders: by their status: how many, and how many events.
        report: the page.
    """

    archived: int = 0
    mirrored: int = 0
    files: int = 0
    bytes: int = 0
    orders: dict[str, tuple[int, int]] = field(default_factory=dict)
    report: Path = Path()
    checks: list[tuple[str, bool]] = field(default_factory=list)
    seconds: float = 0.0


def missing() -> list[str]:
    """What is not installed of that which it takes."""
    return [name for name in NEEDED if find_spec(name) is None]


def run(conn: Connection, dsn: str, lake: Path, page: Path, watch: Progress) -> Lake:
    """Archive, mirror, look, report; `watch` hears how far it is."""
    from postbus.lake import open_table
    from postbus.pipelines import archive, mirror, report
    from postbus.spark import read_lake, session

    result = Lake(report=page)
    begun = time.monotonic()
    spark = session("postbus demo", memory="1g", config={"spark.sql.shuffle.partitions": "2"})
    try:
        archive("orders", lake=lake, dsn=dsn, spark=spark, progress=watch)
        mirror("orders", lake=lake, name="orders", dsn=dsn, spark=spark, progress=watch)
        watch(0, None, "asking the lake")
        tables = [open_table(str(lake), name) for name in ("events", "orders")]
        found = [file for table in tables for file in table.files()]
        result.files, result.bytes = len(found), sum(file.size for file in found)
        events, orders = (read_lake(spark, str(lake), name) for name in ("events", "orders"))
        events.createOrReplaceTempView("events")
        orders.createOrReplaceTempView("mirrored_orders")
        archived, kept = events.collect(), orders.collect()
        result.archived, result.mirrored = len(archived), len(kept)
        result.orders = {r.status: (r.orders, r.events) for r in spark.sql(_PER_STATUS).collect()}
        report(dsn=dsn, lake=lake, out=page, spark=spark, progress=watch)
    finally:
        spark.stop()
    _check(conn, result, archived, kept)
    result.seconds = time.monotonic() - begun
    return result


def _check(conn: Connection, result: Lake, archived: list[Any], kept: list[Any]) -> None:
    rows = conn.execute("select id, customer, status from orders").fetchall()
    billed = {event for (event,) in conn.execute("select event from billed").fetchall()}
    paid = sum(n % _shop.PAID_EVERY == 0 for n in _shop.ORDERS)
    new = len(_shop.ORDERS) - paid
    result.checks += [
        (
            "the archive in the lake has every event exactly once",
            len(archived) == len(billed) and {r.id for r in archived} == billed,
        ),
        (
            "the mirror in the lake equals the table",
            sorted(rows) == sorted((r.id, r.customer, r.status) for r in kept),
        ),
        (
            "Spark SQL finds the events of each order by joining the two",
            result.orders == {"new": (new, new), "paid": (paid, 2 * paid)},
        ),
        ("the report was written", result.report.is_file() and "<svg" in result.report.read_text("utf-8")),
    ]
