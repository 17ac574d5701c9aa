"""The query: `python -m examples.alerts.detect CHECKPOINT`. From the stream `logins` to the queue `alerts`.

With `--once` it ends when everything is read that is there.
"""

import os
import sys
from typing import TYPE_CHECKING

from postbus import Bus
from postbus.spark import session

from .sessions import OUTPUT, Sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

GAP_SECONDS = 30 * 60
LIMIT = 3
# How late an event may come: transactions that commit late. Less than the gap, or a session that was told to
# be over could go on.
LATE = "2 minutes"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def prepare(dsn: str | None) -> None:
    with Bus(dsn) as bus:
        bus.stream("logins", create=True)
        bus.queue("alerts", create=True)


def start(spark: "SparkSession", dsn: str, checkpoint: str, *, once: bool = False) -> "StreamingQuery":
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)  # transformWithState needs it
    logins = (
        spark.readStream.format("postbus")
        .options(dsn=dsn, subscribe="logins", startingOffsets="earliest")
        .options(columns="id,type,key,at", types="login.ok,login.failed")
        .load()
        .where("key is not null")
        .selectExpr("key", "id", "type", "at", "unix_millis(at) as ms")
    )
    alerts = (
        logins.withWatermark("at", LATE)
        .groupBy("key")
        .transformWithState(
            statefulProcessor=Sessions(GAP_SECONDS, LIMIT),
            outputStructType=OUTPUT,
            outputMode="append",
            timeMode="EventTime",
        )
    )
    # Each batch is sent as a whole, once, whatever is killed meanwhile.
    writer = alerts.writeStream.format("postbus").options(dsn=dsn, queue="alerts")
    writer = writer.option("checkpointLocation", checkpoint).queryName("alerts")
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")).start()


def main() -> None:
    dsn = os.environ["POSTBUS_DSN"]
    once = "--once" in sys.argv
    (checkpoint,) = (a for a in sys.argv[1:] if a != "--once")
    prepare(dsn)
    # As many partitions of the state as the first run had: the checkpoint keeps to them.
    spark = session("alerts", memory="1g", config={"spark.sql.shuffle.partitions": "4"})
    query = start(spark, dsn, checkpoint, once=once)
    print("watching", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main()
