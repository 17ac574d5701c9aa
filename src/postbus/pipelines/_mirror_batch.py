"""One micro-batch of a mirror: the last change of each key, found by Spark, merged in one transaction.

Events of a table are applied in the order of their ids. That is right within a batch, because whoever
changes a row waits for who changed it before, and TRUNCATE waits for all; and from one batch to the next,
because what a transaction waited for had committed before it, and comes in the same window or an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from postbus.pipelines._mirror_rows import RESCUED, Shape, read_changes

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from postbus.lake import LakeTable
    from postbus.pipelines._mirror_history import History

TYPES = ("insert", "update", "delete", "truncate", "snapshot")


class Batches:
    """Applies micro-batches to the lake table, and to its history before that.

    Args:
        shape: the columns.
        target: the lake table.
        history: the table of versions, if there is one.
        head: what the payload of an event of this table begins with, after the operation.
        query: whose batches the tables count. A batch that is in there already changes nothing.
        renew: called when changes have columns that the shape does not know; returns the shape of now.
    """

    def __init__(
        self,
        shape: Shape,
        target: LakeTable,
        history: History | None,
        *,
        head: str,
        query: str,
        renew: Callable[[], Shape],
    ) -> None:
        self.shape = shape
        self.target = target
        self.history = history
        self.head = head
        self.query = query
        self.renew = renew
        self.rescue = RESCUED in target.schema().names
        self.rows = 0  # changes applied by this run
        self.bytes = 0
        self.error: BaseException | None = None

    def __call__(self, df: DataFrame, batch: int) -> None:
        """What foreachBatch calls. Spark would wrap an error beyond recognition: it is kept here as well."""
        try:
            # The first number is that of the empty table.
            self._apply(df, batch + 1)
        except BaseException as exc:
            self.error = exc
            raise

    def _apply(self, df: DataFrame, number: int) -> None:
        from pyspark.sql import functions as f

        spark = df.sparkSession
        # A batch is small: two hundred tasks would cost more than they save.
        spark.conf.set("spark.sql.shuffle.partitions", str(max(2, spark.sparkContext.defaultParallelism)))
        begin = f.concat(f.lit('{"op":"'), f.col("type"), f.lit('"' + self.head))
        events = df.where(f.col("payload").startswith(begin)).withColumnRenamed("type", "op")
        if self.history is not None:
            events = events.persist()
        try:
            found = self._read(events)
            if self.history is not None:
                rows = changes(events, self.shape)
                self.history.apply(rows, truncates(events), self.shape, (self.query, number))
            self._merge(found, number)
        finally:
            if self.history is not None:
                events.unpersist()

    def _read(self, events: DataFrame) -> pa.Table:
        """The last changes, in a shape that has a column for all of them, and for all versions."""
        last = last_changes(events)
        found = changes(last, self.shape, final=False).toArrow()
        unknown = found["unknown"].null_count < found.num_rows
        if self.history is not None and not unknown:
            unknown = not changes(events, self.shape, final=False).where("unknown is not null").isEmpty()
        if not unknown:
            return found
        self.shape = self.renew()
        return changes(last, self.shape).toArrow()

    def _merge(self, found: pa.Table, number: int) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        if not found.num_rows:
            return
        cut = pc.max(pc.if_else(pc.equal(found["op"], "truncate"), found["id"], None)).as_py()
        left = found if cut is None else found.filter(pc.greater(found["id"], cut))
        self.rescue = self.rescue or left["rescued"].null_count < left.num_rows
        rows = flat(left, self.shape, self.rescue)
        op = pc.if_else(pc.equal(left["op"], "delete"), "delete", "upsert")
        rows = rows.append_column("_op", op.cast(pa.string()))
        self.target.merge(rows, list(self.shape.keys), self.query, number, truncate=cut is not None)
        self.rows += pc.sum(found["events"]).as_py()
        self.bytes += pc.sum(found["bytes"]).as_py()


def last_changes(events: DataFrame) -> DataFrame:
    """The last event of each key; those of truncates have no key, and one of them is left."""
    from pyspark.sql import functions as f

    last = f.max_by(f.struct("id", "op", "payload", "at"), "id").alias("last")
    size = f.sum(f.octet_length("payload")).alias("bytes")
    return (
        events.groupBy("key")
        .agg(last, f.count("*").alias("events"), size)
        .select("last.*", "events", "bytes")
    )


def truncates(events: DataFrame) -> list[tuple[int, int]]:
    """When the table was truncated: id and microseconds.

    A truncate is an event for each lane, with nothing of the table between them: the first will do.
    """
    first = "op = 'truncate' and get_json_object(payload, '$.lane') = '0'"
    found = events.where(first).selectExpr("id", "unix_micros(at) as at").collect()
    return [(row.id, row.at) for row in found]


def changes(events: DataFrame, shape: Shape, *, final: bool = True) -> DataFrame:
    """Events as rows of the table: id, op, at, row, rescued, unknown, and if there events and bytes.

    What has no column is in `rescued` in the end, and in `unknown` as long as it may still get one.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    counted = [pa.field(name, pa.int64()) for name in ("events", "bytes") if name in events.columns]
    wanted = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("op", pa.string()),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("row", pa.struct(list(shape.schema()))),
            pa.field("rescued", pa.string()),
            pa.field("unknown", pa.string()),
            *counted,
        ]
    )
    made = from_arrow_schema(wanted, prefer_timestamp_ntz=True)
    schema = to_arrow_schema(made, timezone="UTC")
    return events.mapInArrow(partial(_task, shape=shape, schema=schema, final=final), made)


def _task(
    batches: Iterator[pa.RecordBatch], shape: Shape, schema: pa.Schema, final: bool
) -> Iterator[pa.RecordBatch]:
    return read_changes(batches, shape, schema, final)


def flat(found: pa.Table, shape: Shape, rescue: bool) -> pa.Table:
    """The rows as a table of the lake, with the column of rescued values where it is needed."""
    import pyarrow as pa

    schema = shape.schema()
    columns = found["row"].combine_chunks().flatten()
    rows = pa.Table.from_arrays([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    return rows.append_column(RESCUED, found["rescued"].cast(pa.string())) if rescue else rows
