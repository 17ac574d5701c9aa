"""From the stream `orders` to a table, and from the table to the queue `big_orders`."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table(comment="Every event of the stream, each once.")
def orders() -> DataFrame:
    events = (
        spark.readStream.format("postbus")  # on $POSTBUS_DSN
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("payloadSchema", "order bigint, item string, cents bigint")
        .load()
    )
    return events.selectExpr("id", "at", "type", "key as customer", "data.order", "data.item", "data.cents")


dp.create_sink("big_orders", "postbus", {"queue": "big_orders"})


@dp.append_flow(target="big_orders")
def tell_somebody() -> DataFrame:
    big = spark.readStream.table("orders").where("type = 'order.placed' and cents >= 10000")
    return big.selectExpr("to_json(struct(order, item, cents)) as payload", "customer as key")
