"""The versions of the rows of a mirrored table (SCD 2): from when to when each of them was there.

A version is a row that is named by the event which began it, so a batch that comes again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from postbus.pipelines._mirror_rows import RESCUED, Shape

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from postbus.lake import LakeTable

ID, TYPE, END_ID, END_TYPE, FROM, TO = "_id", "_type", "_end_id", "_end_type", "valid_from", "valid_to"
NAMES = (ID, TYPE, FROM, TO, END_ID, END_TYPE)
# Columns that are there for a while. A table has none of these names.
NEW, VALUES, BEFORE, AFTER, CUT, END = (
    f"_history_{n}" for n in ("new", "values", "before", "after", "cut", "end")
)
# Ids are those of a stream, which may be another one after a rebuild.
KEY = (ID, FROM)


class History:
    """The table ``<name>_history``."""

    def __init__(self, table: LakeTable, lake: str, dsn: str, writer: str) -> None:
        self.table = table
        self.lake = lake
        self.dsn = dsn
        self.writer = writer

    def create(self, shape: Shape) -> bool:
        """Make the table where it is missing; columns that come later are added by their rows."""
        return self.table.create(history_schema(shape), writer=self.writer)

    def end_all(self, query: str) -> None:
        """End every version that is there: the mirror begins anew, and nobody knows what it has missed."""
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = self.table.read(where=pc.field(TO).is_null())
        ends: dict[str, Any] = {TO: datetime.now(UTC), END_ID: None, END_TYPE: "rebuild"}
        for name, value in ends.items():
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(
                at, rows.schema.field(at), pa.array([value] * len(rows), rows.schema.field(at).type)
            )
        self._merge(rows, query, 0)

    def apply(
        self, changes: DataFrame, truncates: Sequence[tuple[int, int]], shape: Shape, of: tuple[str, int]
    ) -> None:
        """Add the versions of a batch, and end those that they follow.

        Args:
            changes: all changes of the batch, as rows.
            truncates: when the table was truncated: id and microseconds.
            shape: the columns.
            of: the query and the number of the batch.
        """
        query, number = of
        done = self.table.done(query)
        if done is not None and done >= number:
            return
        rows = versions(self._open(changes, shape, everything=bool(truncates)), sorted(truncates), shape)
        found = rows.toArrow()
        if not found.num_rows:
            return
        if RESCUED not in self.table.schema().names and found[RESCUED].null_count == found.num_rows:
            found = found.drop_columns([RESCUED])
        wanted = {f.name: f.type for f in history_schema(shape)}
        for at, name in enumerate(found.column_names):
            if name in wanted:
                found = found.set_column(at, name, found[name].cast(wanted[name]))
        self._merge(found, query, number)

    def _merge(self, rows: pa.Table, query: str, number: int) -> None:
        import pyarrow as pa

        op = pa.array(["upsert"] * len(rows), pa.string())
        self.table.merge(rows.append_column("_op", op), list(KEY), query, number)

    def _open(self, changes: DataFrame, shape: Shape, everything: bool) -> DataFrame:
        """The changes of a batch, and the open versions of the same keys: of all keys after a truncate."""
        from pyspark.sql import functions as f

        from postbus.spark import read_lake

        name, format_ = self.table.name, self.table.format
        there = read_lake(changes.sparkSession, self.lake, name, format=format_, dsn=self.dsn).where(
            f.col(TO).isNull()
        )
        new = changes.where("op <> 'truncate'").select(
            *(f.col("row").getField(n).alias(n) for n in shape.names),
            f.col("rescued").alias(RESCUED),
            f.col("id").alias(ID),
            f.col("op").alias(TYPE),
            f.col("at").alias(FROM),
            f.lit(True).alias(NEW),
        )
        for column, kind in new.dtypes:
            if column not in there.columns and column != NEW:
                there = there.withColumn(column, f.lit(None).cast(kind))
        there = there.withColumn(NEW, f.lit(False)).select(new.columns)
        if not everything:
            keys = new.select(*map(_quoted, shape.keys)).distinct()
            there = there.join(keys, list(shape.keys), "left_semi").select(new.columns)
        return there.union(new)


def history_schema(shape: Shape) -> pa.Schema:
    """The columns of the table, and of its versions."""
    import pyarrow as pa

    time = pa.timestamp("us", "UTC")
    kinds = {
        ID: pa.int64(),
        TYPE: pa.string(),
        FROM: time,
        TO: time,
        END_ID: pa.int64(),
        END_TYPE: pa.string(),
    }
    return pa.schema([*shape.schema(), *(pa.field(name, kinds[name]) for name in NAMES)])


def versions(events: DataFrame, truncates: Sequence[tuple[int, int]], shape: Shape) -> DataFrame:
    """The versions that are new or have ended.

    A snapshot that says what is known already, as backfills do, is no version.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    each = Window.partitionBy(*map(_quoted, shape.keys)).orderBy(ID)
    values = f.struct(*(_quoted(n) for n in shape.names if n not in shape.keys), RESCUED)
    events = events.withColumn(VALUES, values)
    before = f.lag(f.struct(ID, TYPE, VALUES)).over(each)
    events = events.withColumn(BEFORE, before).withColumn(CUT, _first_after(f"{BEFORE}.{ID}", truncates))
    known = (
        (f.col(TYPE) == "snapshot")
        & f.col(BEFORE).isNotNull()
        & (f.col(f"{BEFORE}.{TYPE}") != "delete")
        & (f.col(CUT).isNull() | (f.col(f"{CUT}.id") > f.col(ID)))
        & f.col(VALUES).eqNullSafe(f.col(f"{BEFORE}.{VALUES}"))
    )
    events = events.where(~f.coalesce(known, f.lit(False)))
    after = f.lead(f.struct(f.col(ID).alias("id"), f.col(FROM).alias("at"), f.col(TYPE).alias("type"))).over(
        each
    )
    events = events.withColumn(AFTER, after).withColumn(CUT, _first_after(ID, truncates))
    end = f.when(
        f.col(CUT).isNotNull() & (f.col(AFTER).isNull() | (f.col(f"{CUT}.id") < f.col(f"{AFTER}.id"))),
        f.col(CUT),
    )
    events = events.withColumn(END, f.coalesce(end, f.col(AFTER)))
    return events.where((f.col(TYPE) != "delete") & (f.col(NEW) | f.col(END).isNotNull())).select(
        *map(_quoted, shape.names),
        RESCUED,
        ID,
        TYPE,
        FROM,
        f.col(f"{END}.at").alias(TO),
        f.col(f"{END}.id").alias(END_ID),
        f.col(f"{END}.type").alias(END_TYPE),
    )


def _first_after(column: str, truncates: Sequence[tuple[int, int]]) -> Column:
    """The first truncate after an event: (id, at, type), or null."""
    from pyspark.sql import functions as f

    kind = "struct<id: bigint, at: timestamp, type: string>"
    found = f.lit(None).cast(kind)
    # From the last to the first: the innermost case is tried last.
    for id_, at in reversed(truncates):
        one = f.struct(
            f.lit(id_).cast("bigint").alias("id"),
            f.timestamp_micros(f.lit(at)).alias("at"),
            f.lit("truncate").alias("type"),
        )
        found = f.when(f.col(column) < id_, one.cast(kind)).otherwise(found)
    return found


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
