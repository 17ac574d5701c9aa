"""Schemas: what a lake can hold, and how a table grows.

Columns are added and never changed. A type fits another where no value can be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from postbus.errors import BadArgument

RESCUED = "_rescued"
LONGEST_NAME = 128
_BAD_NAME = set(" ,;{}()\n\t=")
_INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]


def can_be_column(name: str) -> bool:
    """Whether readers of Parquet take this name."""
    return 0 < len(name) <= LONGEST_NAME and not _BAD_NAME & set(name) and name.isprintable()


def plain(schema: pa.Schema, integers: Sequence[pa.DataType] = _INTEGERS) -> pa.Schema:
    """The schema in the types that lakes have: no large types, times in microseconds, in UTC if in any zone.

    Raises:
        BadArgument: a column has a type that no lake has, or a name that Parquet's readers refuse.
    """
    seen: set[str] = set()
    for field in schema:
        if field.name.lower() in seen:
            raise BadArgument(
                f"column {field.name!r} is there twice", hint="Names that differ only in case count as one."
            )
        seen.add(field.name.lower())
        if not can_be_column(field.name):
            raise BadArgument(
                f"{field.name!r} is no name for a column of a lake",
                hint="Without spaces and without any of ,;{}()= in it. Use withColumnRenamed() or an alias.",
            )
    return pa.schema([pa.field(f.name, _plain(f.name, f.type, integers)) for f in schema])


def _plain(name: str, kind: pa.DataType, integers: Sequence[pa.DataType]) -> pa.DataType:  # noqa: PLR0911
    t = pa.types
    if t.is_dictionary(kind):
        return _plain(name, kind.value_type, integers)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.binary()
    if t.is_signed_integer(kind):
        return next(i for i in integers if i.bit_width >= kind.bit_width)
    if t.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if kind in (pa.bool_(), pa.float32(), pa.float64(), pa.date32()):
        return kind
    if t.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if t.is_list(kind) or t.is_large_list(kind):
        return pa.list_(pa.field("element", _plain(name, kind.value_type, integers)))
    if t.is_map(kind):
        return pa.map_(_plain(name, kind.key_type, integers), _plain(name, kind.item_type, integers))
    if t.is_struct(kind):
        return pa.struct([pa.field(f.name, _plain(name, f.type, integers)) for f in kind])
    raise BadArgument(
        f"column {name!r} is of type {kind}, which a lake table cannot hold",
        hint="Cast it, to a string for example, or leave it out.",
    )


def fits(kind: pa.DataType, into: pa.DataType) -> bool:
    """Whether every value of one type is a value of the other."""
    t = pa.types
    if kind == into or t.is_null(kind):
        return True
    if t.is_signed_integer(kind) and t.is_signed_integer(into):
        return bool(kind.bit_width <= into.bit_width)
    if t.is_floating(into):
        bits = kind.bit_width if t.is_signed_integer(kind) or t.is_float32(kind) else 64
        return bool(bits <= 32 and t.is_float64(into))
    if t.is_decimal(kind) and t.is_decimal(into):
        return bool(kind.scale <= into.scale and kind.precision - kind.scale <= into.precision - into.scale)
    return False


def grown(there: pa.Schema, more: pa.Schema, table: str) -> pa.Schema:
    """The schema of a table that takes rows of another schema too: new columns come last.

    Raises:
        BadArgument: a column of the rows does not fit the column of the table.
    """
    by_lower = {f.name.lower(): f for f in there}
    fields = list(there)
    for field in more:
        known = by_lower.get(field.name.lower())
        if known is None:
            fields.append(field)
        elif known.name != field.name:
            raise BadArgument(
                f"lake table {table} has a column {known.name!r}, and the rows have {field.name!r}",
                hint="Names that differ only in case count as one: use the table's name.",
            )
        elif not fits(field.type, known.type):
            raise BadArgument(
                f"column {field.name!r} of lake table {table} is {known.type}, not {field.type}",
                hint="The type of a column never changes: cast it, rename it, or write to a new table.",
            )
    return pa.schema(fields)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with the columns and types of a schema; columns that they lack are null."""
    there = set(batch.schema.names)
    columns = [
        batch.column(f.name).cast(f.type) if f.name in there else pa.nulls(batch.num_rows, f.type)
        for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_partitions(schema: pa.Schema, partition_by: Sequence[str], table: str) -> None:
    """Partition columns exist, are of a simple type, and are not everything."""
    for name in partition_by:
        if name not in schema.names:
            raise BadArgument(
                f"option partitionBy names {name!r}, which the rows do not have",
                hint=f"Columns are {', '.join(schema.names)}; date is made from at.",
            )
        kind = schema.field(name).type
        t = pa.types
        if not (t.is_string(kind) or t.is_signed_integer(kind) or t.is_date32(kind) or t.is_boolean(kind)):
            raise BadArgument(
                f"option partitionBy names {name!r}, which is of type {kind}",
                hint="Partition by texts, whole numbers, dates or booleans.",
            )
    if len(set(partition_by)) < len(partition_by):
        raise BadArgument("option partitionBy names a column twice", detail=", ".join(partition_by))
    if len(partition_by) == len(schema):
        raise BadArgument(f"lake table {table} has no columns but those it is partitioned by")
