"""Arrow from what `read_columns` returns (docs/reference/windows.md): no value is touched one by one."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg import Cursor

TEXTS = ("type", "key", "payload")
SPARSE = ("blob", "headers")
NULL = b"\xff" * 4  # a length of -1; two others side by side do not have it either: they are below 2**30
EPOCH = 946_684_800_000_000  # microseconds from 1970 to 2000, where PostgreSQL begins to count


def tables(cur: Cursor[Any], wanted: Sequence[str], size: int) -> Iterator[pa.Table]:
    """The events of the chunks as tables with the wanted columns; chunks below that size go together.

    Values are taken from the result when their turn comes: little memory, which is used again and again.
    """
    names = [c.name for c in cur.description or []]
    rows: list[dict[str, Any]] = []
    held = 0
    for row in cur:
        rows.append(dict(zip(names, row, strict=True)))
        held += sum(len(v) for v in row if isinstance(v, bytes))
        if held >= size:
            yield _Chunks(rows).table(wanted)
            rows, held = [], 0
    if rows:
        yield _Chunks(rows).table(wanted)


class _Chunks:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.events = sum(r["events"] for r in rows)

    def table(self, wanted: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        return pa.table({name: self.column(name) for name in wanted})

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
            return pa.repeat(_scalar("q", self.rows[0]["tick"]), self.events)
        data = self.joined(name)
        if name == "lane":
            return _arrow(_numbers("i", data)) if data else pa.repeat(_scalar("i", 0), self.events)
        numbers = _arrow(_numbers("q", data))
        return (
            pc.add(numbers, _scalar("q", EPOCH)).view(pa.timestamp("us", "UTC")) if name == "at" else numbers
        )

    def _sparse(self, name: str) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        places = self.joined(f"{name}_places")
        if not places:
            return pa.nulls(self.events, pa_kind(name))
        # 12 bytes each: the id is the first and second of three numbers of 4 bytes.
        numbers = _numbers("i", places)
        high, low = (_arrow(numbers[at::3]).cast(pa.int64()) for at in (0, 1))
        upper = pc.shift_left(high, _scalar("q", 32))
        ids = pc.bit_wise_or(upper, pc.bit_wise_and(low, _scalar("q", 0xFFFFFFFF)))
        values = _strings(pa_kind(name), numbers[2::3], self.joined(name))
        return values.take(pc.index_in(_arrow(_numbers("q", self.joined("id"))), value_set=ids))


def pa_kind(name: str) -> pa.DataType:
    """The Arrow type of a column of texts or bytes."""
    import pyarrow as pa

    return pa.binary() if name == "blob" else pa.string()


def _numbers(kind: str, data: bytes) -> array.array[int]:
    """Whole numbers of 4 (i) or 8 (q) bytes, the highest byte first."""
    values = array.array(kind, data)
    if sys.byteorder == "little":
        values.byteswap()
    return values


def _arrow(values: array.array[int]) -> pa.Array:
    import pyarrow as pa

    kind = pa.int64() if values.typecode == "q" else pa.int32()
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _scalar(kind: str, value: int) -> pa.Scalar:
    """Not pa.scalar: that imports pandas, which costs a worker more time than 100,000 events."""
    return _arrow(array.array(kind, [value]))[0]


def text(value: str) -> pa.Scalar:
    """The same for a text."""
    data = value.encode()
    return _strings(pa_kind("text"), array.array("i", [len(data)]), data)[0]


def _strings(kind: pa.DataType, lengths: array.array[int], data: bytes) -> pa.Array:
    """Values from their lengths and all of their bytes; a length of -1 is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    steps, validity = _arrow(array.array("i", [0]) + lengths), None
    if NULL in lengths.tobytes():
        validity = pc.greater_equal(steps.slice(1), _scalar("i", 0)).buffers()[1]
        steps = pc.max_element_wise(steps, _scalar("i", 0))
    offsets = pc.cumulative_sum_checked(steps).buffers()[1]
    return pa.Array.from_buffers(kind, len(lengths), [validity, offsets, pa.py_buffer(data)])
