"""Files written anew: without rows that have changed, or fewer of them.

Both formats can take files out and put files in within one commit. So a merge is copy-on-write: files that
hold a changed key are written again without it, and the new rows go where the rest of these files goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postbus.errors import BadArgument
from postbus.lake._files import FileWriter, LakeFile
from postbus.lake._place import partition_value
from postbus.lake._schema import conform

if TYPE_CHECKING:
    from postbus.lake._table import LakeTable

OP = "_op"


@dataclass(frozen=True)
class Changes:
    """What a merge was given."""

    keys: pa.Table  # of all changed rows
    upserts: pa.Table
    on: tuple[str, ...]

    @classmethod
    def of(cls, changes: pa.Table, on: Sequence[str], table: str) -> Changes:
        """Check it."""
        missing = [c for c in (*on, OP) if c not in changes.column_names]
        if missing or not on:
            raise BadArgument(f"changes of lake table {table} need a column {(missing or ['as key'])[0]!r}")
        kinds = set(pc.unique(changes[OP]).to_pylist())
        if not kinds <= {"upsert", "delete"}:
            raise BadArgument(f"{OP} must be upsert or delete, not {sorted(map(str, kinds))}")
        keys = changes.select(list(on))
        if any(keys[c].null_count for c in on):
            raise BadArgument(f"a key of lake table {table} is null: {', '.join(on)}")
        if len(keys.group_by(list(on)).aggregate([])) < len(keys):
            raise BadArgument(
                f"changes of lake table {table} have a key twice", hint="Keep the last of each."
            )
        upserts = changes.filter(pc.equal(changes[OP], "upsert")).drop_columns([OP])
        return cls(keys, upserts, tuple(on))


def merged(
    table: LakeTable, schema: pa.Schema, changes: Changes, truncate: bool
) -> tuple[list[LakeFile], list[LakeFile]]:
    """The files to add and to remove."""
    keys = conform_table(changes.keys, pa.schema([schema.field(c) for c in changes.on]))
    remove: list[LakeFile] = []
    with FileWriter(table.layout) as writer:
        for file in table.files():
            if truncate:
                remove.append(file)
                continue
            lost = _matches(table, file, schema, keys) if _may_match(file, keys) else None
            if lost is not None:
                remove.append(file)
                at = 0
                for batch in rows(table, file, schema):
                    writer.write(batch.filter(pc.invert(lost.slice(at, batch.num_rows))))
                    at += batch.num_rows
        for batch in conform_table(changes.upserts, schema).to_batches():
            writer.write(batch)
    return writer.files, remove


def compacted(table: LakeTable, target: int) -> tuple[list[LakeFile], list[LakeFile]]:
    """Files much smaller than the target, put together with others of their partition."""
    schema = table.schema()
    groups: dict[tuple[str | None, ...], list[LakeFile]] = {}
    for file in table.files():
        if file.size < target * 3 // 4:
            groups.setdefault(tuple(file.partition.values()), []).append(file)
    added: list[LakeFile] = []
    removed: list[LakeFile] = []
    for group in groups.values():
        if len(group) < 2:
            continue
        with FileWriter(table.layout, target) as writer:
            for file in group:
                for batch in rows(table, file, schema):
                    writer.write(batch)
        if len(writer.files) >= len(group):  # nothing would be gained
            writer.discard()
            continue
        added += writer.files
        removed += group
    return added, removed


def rows(table: LakeTable, file: LakeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file with the columns of the table, a row group at a time."""
    with pq.ParquetFile(table.place.path(file.path), filesystem=table.place.fs) as parquet:
        for group in range(parquet.num_row_groups):
            for batch in parquet.read_row_group(group).to_batches():
                yield conform(_with_partition(batch, file, schema), schema)


def _with_partition(batch: pa.RecordBatch, file: LakeFile, schema: pa.Schema) -> pa.RecordBatch:
    for name, text in file.partition.items():
        if name not in batch.schema.names and name in schema.names:
            kind = schema.field(name).type
            value: Any = pa.scalar(partition_value(text, kind), kind)
            batch = batch.append_column(schema.field(name), pa.repeat(value, batch.num_rows))
    return batch


def conform_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """As `conform`, for a table."""
    return pa.Table.from_batches([conform(b, schema) for b in table.to_batches()], schema)


def _may_match(file: LakeFile, keys: pa.Table) -> bool:
    """Whether the file's bounds leave room for any of the keys."""
    for name in keys.column_names:
        if name in file.partition:
            kind = keys.schema.field(name).type
            value = pa.scalar(partition_value(file.partition[name], kind), kind)
            if not value.is_valid or not pc.any(pc.equal(keys[name], value)).as_py():
                return False
            continue
        low, high = file.stats.lower.get(name), file.stats.upper.get(name)
        if low is None or high is None:
            continue
        column = keys[name]
        kind = column.type
        inside = pc.and_(
            pc.greater_equal(column, pa.scalar(low, kind)), pc.less_equal(column, pa.scalar(high, kind))
        )
        if not pc.any(inside).as_py():
            return False
    return True


def _matches(table: LakeTable, file: LakeFile, schema: pa.Schema, keys: pa.Table) -> pa.ChunkedArray | None:
    """Which rows of the file have one of the keys; none if no row has."""
    names = keys.column_names
    wanted = pa.schema([schema.field(n) for n in names])
    with pq.ParquetFile(table.place.path(file.path), filesystem=table.place.fs) as parquet:
        stored = [n for n in names if n in parquet.schema_arrow.names]
        read = parquet.read(columns=stored)
    batches = [conform(_with_partition(b, file, wanted), wanted) for b in read.to_batches()]
    there = pa.Table.from_batches(batches, wanted)
    count = there.num_rows if stored else file.rows
    numbered = there.append_column("#", pa.array(range(count), pa.int64()))
    hits = numbered.join(keys, names, join_type="left semi")["#"]
    if not len(hits):
        return None
    return pc.is_in(numbered["#"], value_set=hits.combine_chunks())
