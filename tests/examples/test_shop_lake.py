"""The shop in the lake: examples/shop_lake, with Spark in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from postbus.testing import url
from tests.conftest import Database
from tests.spark.conftest import spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark"]
pytest.importorskip("pyspark")
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

TRUTH = """
select c.city, l.item, sum(l.quantity) as sold, sum(l.quantity * l.price) as turnover
from shop.customer c
join shop.orders o on o.customer = c.id and not o.cancelled
join shop.order_line l on l.orders = o.id
group by c.city, l.item order by c.city, l.item
"""


def test_the_lake_says_what_the_shop_says(
    server_dsn: str, db: Database, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.shop_lake.sales import sales, update
    from examples.shop_lake.shop import do_business, open_shop

    dsn, lake = url(server_dsn, db.name), str(tmp_path / "lake")
    conn = db.connect()

    def same() -> list[tuple[Any, ...]]:
        found = [tuple(row) for row in sales(spark, lake).collect()]
        assert found == conn.execute(TRUTH).fetchall()
        return found

    open_shop(dsn)
    do_business(dsn, 40)
    update(spark, dsn, lake)
    before = same()
    assert len({city for city, *_ in before}) > 1
    do_business(dsn, 20, seed=2)
    update(spark, dsn, lake)
    assert same() != before
    assert "shop.orders: " in capsys.readouterr().out
