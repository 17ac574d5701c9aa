"""Mirror the tables and ask the lake: `python -m examples.shop_lake.sales LAKE`."""

import os
import sys
from typing import TYPE_CHECKING

from postbus.pipelines import mirror
from postbus.spark import read_lake, session

from .shop import TABLES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SALES = """
select c.city, l.item, sum(l.quantity) as sold, sum(l.quantity * l.price) as turnover
from customer c
join orders o on o.customer = c.id and not o.cancelled
join order_line l on l.orders = o.id
group by c.city, l.item
order by c.city, l.item
"""


def update(spark: "SparkSession", dsn: str, lake: str) -> None:
    """Bring the lake up to date. Lines come first: when they are there, their orders will be too."""
    for table in TABLES:
        run = mirror(table, lake=lake, dsn=dsn, spark=spark)
        print(f"{table}: {run.rows} changes in {run.seconds:.1f} s")


def sales(spark: "SparkSession", lake: str) -> "DataFrame":
    """What was sold, by city and item."""
    for name in ("customer", "orders", "order_line"):
        read_lake(spark, lake, f"shop_{name}").createOrReplaceTempView(name)
    return spark.sql(SALES)


def main() -> None:
    lake = sys.argv[1]
    spark = session()
    update(spark, os.environ["POSTBUS_DSN"], lake)
    sales(spark, lake).show()


if __name__ == "__main__":
    main()
