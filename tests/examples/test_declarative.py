"""The declarative pipeline: examples/declarative, run by the real spark-pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postbus import Bus
from postbus.testing import url
from tests.conftest import Database
from tests.docs.pages import ROOT

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600), pytest.mark.slow]


def run(folder: Path, dsn: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.declarative.run", str(folder)],
        cwd=ROOT,
        env=os.environ | {"POSTBUS_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows(folder: Path, table: str) -> list[tuple[Any, ...]]:
    import pyarrow.dataset

    # Files as they lie there: nothing was killed, so there are none that do not count.
    found = pyarrow.dataset.dataset(folder / "tables" / table).to_table()
    return sorted(tuple(row.values()) for row in found.to_pylist())


def place(bus: Bus, first: int, last: int) -> None:
    orders = bus.stream("orders")
    for n in range(first, last + 1):
        order = {"order": n, "item": "tea" if n % 2 else "cup", "cents": 3000 * n}
        orders.publish(order, type="order.placed", key=f"customer-{n}")


def test_two_runs(server_dsn: str, db: Database, tmp_path: Path) -> None:
    dsn = url(server_dsn, db.name)
    with Bus(dsn) as bus:
        bus.stream("orders", create=True)
        bus.queue("big_orders", create=True)
        place(bus, 1, 4)
        bus.stream("orders").publish({"order": 1}, type="order.cancelled", key="customer-1")
        printed = run(tmp_path, dsn)
        assert "Run is COMPLETED" in printed
        assert "Traceback" not in printed
        assert "ERROR" not in printed
        assert rows(tmp_path, "revenue") == [("cup", 2, 18000), ("tea", 1, 9000)]
        place(bus, 5, 6)
        run(tmp_path, dsn)
    log = db.connect().execute("select id, key, type from postbus.log order by id").fetchall()
    there = [(r[0], r[3], r[2]) for r in rows(tmp_path, "orders")]
    assert there == log, "each event once, over both runs"
    assert rows(tmp_path, "revenue") == [("cup", 3, 36000), ("tea", 2, 24000)]
    queued = db.connect().execute("select key from postbus.peek('big_orders', max => 100) order by id")
    assert queued.fetchall() == [("customer-4",), ("customer-5",), ("customer-6",)]
