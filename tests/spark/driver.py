"""A driver process that exists to be killed: a stream into Parquet, Delta or another stream.

python -m tests.spark.driver DSN OUT SINK MAX
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from postbus.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}


def into_delta(path: Path) -> object:
    """Writes each batch once: Delta remembers the last batch of an application in the same transaction."""
    import deltalake

    def write(df: DataFrame, batch: int) -> None:
        table = deltalake.DeltaTable(str(path)) if deltalake.DeltaTable.is_deltatable(str(path)) else None
        if table is not None and (table.transaction_version("driver") or -1) >= batch:
            return
        properties = deltalake.CommitProperties(app_transactions=[deltalake.Transaction("driver", batch)])
        deltalake.write_deltalake(str(path), df.toArrow(), mode="append", commit_properties=properties)

    return write


def main() -> None:
    dsn, out, sink, most = sys.argv[1:]
    spark = session("driver", master="local[2]", memory="1g", config=SETTINGS)
    df = (
        spark.readStream.format("postbus")
        .options(
            dsn=dsn, subscribe="s", startingOffsets="earliest", maxEventsPerTrigger=most, minPartitions="3"
        )
        .options(group="spark", columns="id,payload")
        .load()
    )
    writer = df.writeStream.option("checkpointLocation", f"{out}/checkpoint")
    if sink == "delta":
        query = writer.foreachBatch(into_delta(Path(out, "data"))).start()  # type: ignore[arg-type]
    elif sink == "stream":
        events = df.select("payload").writeStream.option("checkpointLocation", f"{out}/checkpoint")
        query = events.format("postbus").options(dsn=dsn, stream="copy").start()
    else:
        query = writer.format("parquet").start(f"{out}/data")
    print("ready", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main()
