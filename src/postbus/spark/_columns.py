"""Arrow from what `read_columns` returns (docs/reference/windows.md): no value is touched one by one."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = ("type", "key", "payload")
SPARSE = ("blob", "headers")
EPOCH = 946_684_800_000_000  # microseconds from 1970 to 2000, where PostgreSQL begins to count


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], wanted: Sequence[str]) -> pa.Table:
    """The events of the chunks as a table with the wanted columns."""
    import pyarrow as pa

    chunks = _Chunks([dict(zip(names, row, strict=True)) for row in rows])
    return pa.table({name: chunks.column(name) for name in wanted})


class _Chunks:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.events = sum(r["events"] for r in rows)

    def joined(self, name: str) -> bytes:
        """What all chunks have of a value."""
        parts = [r[name] for r in self.rows if r[name] is not None]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def column(self, name: str) -> pa.Array:
        if name in TEXTS:
            return _strings(pa_kind(name), _numbers("i", self.joined(f"{name}_lengths")), self.joined(name))
        return self._sparse(name) if name in SPARSE else self._number(name)

    def _number(self, name: str) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        if name == "tick":
            return pa.repeat(pa.scalar(self.rows[0]["tick"] if self.rows else 0, pa.int64()), self.events)
        data = self.joined(name)
        if name == "lane":
            return _numbers("i", data) if data else pa.repeat(pa.scalar(0, pa.int32()), self.events)
        numbers = _numbers("q", data)
        return pc.add(numbers, EPOCH).cast(pa.timestamp("us", "UTC")) if name == "at" else numbers

    def _sparse(self, name: str) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        places = self.joined(f"{name}_places")
        if not places:
            return pa.nulls(self.events, pa_kind(name))
        # 12 bytes each: the id is the first and second of three numbers of 4 bytes.
        numbers = _numbers("i", places)
        high, low = (_every_third(numbers, at).cast(pa.int64()) for at in (0, 1))
        ids = pc.bit_wise_or(pc.shift_left(high, 32), pc.bit_wise_and(low, 0xFFFFFFFF))
        values = _strings(pa_kind(name), _every_third(numbers, 2), self.joined(name))
        return values.take(pc.index_in(_numbers("q", self.joined("id")), value_set=ids))


def pa_kind(name: str) -> pa.DataType:
    """The Arrow type of a column of texts or bytes."""
    import pyarrow as pa

    return pa.binary() if name == "blob" else pa.string()


def _every_third(numbers: pa.Array, first: int) -> pa.Array:
    import pyarrow as pa

    return numbers.take(pa.array(range(first, len(numbers), 3), pa.int32()))


def _numbers(kind: str, data: bytes) -> pa.Array:
    """Whole numbers of 4 (i) or 8 (q) bytes, the highest byte first."""
    import pyarrow as pa

    values = array.array(kind, data)
    if sys.byteorder == "little":
        values.byteswap()
    return pa.Array.from_buffers(
        pa.int64() if kind == "q" else pa.int32(), len(values), [None, pa.py_buffer(values)]
    )


def _strings(kind: pa.DataType, lengths: pa.Array, data: bytes) -> pa.Array:
    """Values from their lengths and all of their bytes; a length of -1 is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    there = pc.greater_equal(lengths, 0)
    validity = None
    if not pc.all(there).as_py():
        validity = there.buffers()[1]
        lengths = pc.max_element_wise(lengths, pa.scalar(0, pa.int32()))
    ends = pc.cumulative_sum_checked(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.Array.from_buffers(kind, len(lengths), [validity, offsets.buffers()[1], pa.py_buffer(data)])
