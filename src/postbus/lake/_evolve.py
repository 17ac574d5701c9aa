"""Files whose writers did not agree: made to fit at the commit.

Tasks of one batch can see a new column with different types, and a batch that committed meanwhile can have
given it another one. The files that lose are written again; what does not fit goes into ``_rescued``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from postbus.errors import BadArgument
from postbus.lake import _rewrite
from postbus.lake._convert import converted
from postbus.lake._files import FileWriter, LakeFile
from postbus.lake._schema import RESCUED, conform, fits

if TYPE_CHECKING:
    from postbus.lake._table import LakeTable


def reconciled(
    table: LakeTable, schema: pa.Schema, files: Sequence[LakeFile]
) -> tuple[pa.Schema, list[LakeFile]]:
    """The schema that holds all files, and the files that fit it.

    Files come in the order of their tasks: for a new column the first of them decides, but whole and broken
    numbers together are broken ones.
    """
    fields = {f.name.lower(): f for f in schema}
    settled = set(fields)
    for file in files:
        for field in file.schema or ():
            known = fields.setdefault(field.name.lower(), field)
            if field.name.lower() not in settled and {known.type, field.type} == {pa.int64(), pa.float64()}:
                fields[field.name.lower()] = pa.field(known.name, pa.float64())
    target = pa.schema(list(fields.values()))
    return target, [file if _fits(file, target) else _mended(table, file, target) for file in files]


def _fits(file: LakeFile, target: pa.Schema) -> bool:
    names = set(target.names)
    return file.schema is None or all(
        f.name in names and fits(f.type, target.field(f.name).type) for f in file.schema
    )


def _mended(table: LakeTable, file: LakeFile, target: pa.Schema) -> LakeFile:
    assert file.schema is not None
    if RESCUED not in target.names:
        wrong = next(f for f in file.schema if not _fits(LakeFile("", 0, 0, schema=pa.schema([f])), target))
        raise BadArgument(
            f"column {wrong.name!r} of lake table {table.name} cannot take {wrong.type}",
            hint="The type of a column never changes: cast it, rename it, or write to a new table.",
        )
    stored = pa.schema([f for f in target if f.name in file.schema.names or f.name == RESCUED])
    full = pa.schema([f for f in target if f in list(stored) or f.name in file.partition])
    mixed = pa.schema([*file.schema, *(f for f in full if f.name not in file.schema.names)])
    with FileWriter(table.layout) as writer:
        for batch in _rewrite.rows(table, file, mixed):
            writer.write(conform(_rescue(batch, target), full))
    (made,) = writer.files
    return made


def _rescue(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Columns that do not fit: converted where they can be, else moved into ``_rescued``."""
    rescued: list[dict[str, Any]] = [{}] * batch.num_rows
    if RESCUED in batch.schema.names:
        rescued = [msgspec.json.decode(v) if v else {} for v in batch.column(RESCUED).to_pylist()]
    columns: dict[str, pa.Array] = {}
    for field in batch.schema:
        column = batch.column(field.name)
        kind = target.field(field.name).type if field.name in target.names else None
        if kind is not None and fits(field.type, kind):
            columns[field.name] = column
            continue
        kept, lost = converted(column.to_pylist(), kind)
        for at, value in lost.items():
            rescued[at] = {**rescued[at], field.name: value}
        if kind is not None:
            columns[field.name] = kept
    texts = [msgspec.json.encode(r).decode() if r else None for r in rescued]
    columns[RESCUED] = pa.array(texts, pa.string())
    return pa.RecordBatch.from_pydict(columns)
