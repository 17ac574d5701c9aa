"""The fields of a JSON column as columns of their own.

A new field becomes a column, of the type that its first values have: boolean, bigint, double, or text.
Objects and arrays are kept as JSON text. A value that does not fit its column is kept in ``_rescued``, a JSON
object by column; so is a field that cannot be a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from postbus.lake._convert import converted, kind_of
from postbus.lake._schema import RESCUED, can_be_column

MOST_COLUMNS = 500
_decode = msgspec.json.Decoder().decode


class Expander:
    """Expands one column of batches, and remembers the columns it has found.

    Args:
        column: the column with the JSON.
        given: the columns that rows have already.
        known: the schema of the table; its types count.
        most: so many columns the table may have; fields beyond are rescued.
    """

    def __init__(self, column: str, given: Sequence[str], known: pa.Schema, most: int = MOST_COLUMNS) -> None:
        self.column = column
        self.most = most
        self._taken = {name.lower() for name in [*given, RESCUED]}
        self._kinds = {f.name: f.type for f in known if f.name.lower() not in self._taken}
        self._lower = {name.lower(): name for name in self._kinds}
        self._names: dict[str, str] = {}

    def expand(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with a column for each known field, and ``_rescued``."""
        values: dict[str, list[Any]] = {}
        rescued: dict[int, dict[str, Any]] = {}
        for at, text in enumerate(batch.column(self.column).to_pylist()):
            for field, value in _fields(text):
                name = self._names.get(field) or self._name(field)
                if name not in values:
                    values[name] = [None] * batch.num_rows
                values[name][at] = value
        arrays: dict[str, pa.Array] = {}
        for name, column in values.items():
            kind = self._kind(name, column)
            array = _fast(column, kind) if kind is not None else None
            if kind is None or array is None:
                array, lost = converted(column, kind)
                for at, value in lost.items():
                    rescued.setdefault(at, {})[name] = value
            if kind is not None:
                arrays[name] = array
        for name, kind in self._kinds.items():
            filled = arrays.get(name)
            batch = batch.append_column(
                pa.field(name, kind), pa.nulls(batch.num_rows, kind) if filled is None else filled
            )
        texts: list[str | None] = [None] * batch.num_rows
        for at, found in rescued.items():
            texts[at] = msgspec.json.encode(found).decode()
        return batch.append_column(pa.field(RESCUED, pa.string()), pa.array(texts, pa.string()))

    def _name(self, field: str) -> str:
        """The column of a field: its name, or with the column's name before it where that is taken."""
        name = f"{self.column}_{field}" if field.lower() in self._taken else field
        if name in self._names.values():  # of another field: with a dot it is rescued
            name = f"{self.column}.{field}"
        self._names[field] = name
        return name

    def _kind(self, name: str, values: Sequence[Any]) -> pa.DataType | None:
        """The type of a column, decided when it is new; none if it is not to be one."""
        if name in self._kinds:
            return self._kinds[name]
        wrong = "." in name or not can_be_column(name)
        if wrong or name.lower() in self._lower or name.lower() in self._taken:
            return None
        kinds = [kind_of(v) for v in values if v is not None]
        kind = next((k for k in kinds if k is not None), None)
        if kind == pa.int64() and pa.float64() in kinds:
            kind = pa.float64()
        if kind is None or len(self._kinds) + len(self._taken) >= self.most:
            return None
        self._kinds[name] = kind
        self._lower[name.lower()] = name
        return kind


def _fields(text: str | None) -> list[tuple[str, Any]]:
    if text is None or not text.lstrip().startswith("{"):
        return []
    try:
        found = _decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return []
    return [(k, v) for k, v in found.items() if v is not None]


def _fast(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    """All at once, where every value is of the very type."""
    wanted = {pa.bool_(): bool, pa.int64(): int, pa.float64(): float, pa.string(): str}.get(kind)
    if wanted is None or not set(map(type, values)) <= {wanted, type(None)}:
        return None
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):  # a number beyond 64 bits
        return None
