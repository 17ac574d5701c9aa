"""Columns of Arrow as arrays of PostgreSQL, in its binary form: no value is touched one by one."""

from __future__ import annotations

import array
import struct
import sys
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

if TYPE_CHECKING:
    import pyarrow as pa

_ELEMENT = {"text": 25, "bytea": 17, "jsonb": 3802}  # object ids, the same in every database
_ARRAY = {"text": 1009, "bytea": 1001, "jsonb": 3807}


class _Texts:
    kind = "text"

    def __init__(self, data: bytes) -> None:
        self.data = data


class _Blobs(_Texts):
    kind = "bytea"


class _Documents(_Texts):
    kind = "jsonb"


_KINDS = {c.kind: c for c in (_Texts, _Blobs, _Documents)}


class _Dumper(Dumper):
    format = Format.BINARY

    def __init__(self, cls: type, context: Any = None) -> None:
        super().__init__(cls, context)
        self.oid = _ARRAY[cls.kind]  # type: ignore[attr-defined]

    def dump(self, obj: Any) -> Buffer | None:
        return bytes(obj.data)


for _cls in _KINDS.values():
    psycopg.adapters.register_dumper(_cls, _Dumper)


def pg_array(column: pa.Array, kind: str) -> Any:
    """A column of texts or bytes as text[], bytea[] or jsonb[]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lead = b"\1" if kind == "jsonb" else b""  # the version of its form
    data = column.cast(pa.binary())
    lengths = pc.add(pc.binary_length(data).cast(pa.int32()), pa.scalar(len(lead), pa.int32()))
    if data.null_count:
        lead_or_none = pc.if_else(data.is_null(), b"", lead) if lead else b""
        lengths, data = pc.fill_null(lengths, -1), pc.fill_null(data, b"")
    else:
        lead_or_none = lead
    parts = [_big_endian(lengths), *([lead_or_none] if lead else []), data]
    joined = pc.binary_join_element_wise(*parts, b"") if len(data) else pa.array([], pa.binary())
    header = struct.pack("!iiiii", 1, 1 if column.null_count else 0, _ELEMENT[kind], len(data), 1)
    return _KINDS[kind](header + _bytes(joined))


def _big_endian(numbers: pa.Array) -> pa.Array:
    """Each number as its four bytes, the highest first."""
    import pyarrow as pa

    values = array.array("i", bytes(_copy(numbers, 4)))
    if sys.byteorder == "little":
        values.byteswap()
    four = pa.Array.from_buffers(pa.binary(4), len(values), [None, pa.py_buffer(values)])
    return four.cast(pa.binary())


def _copy(numbers: pa.Array, size: int) -> memoryview:
    view = memoryview(numbers.buffers()[1])
    return view[numbers.offset * size : (numbers.offset + len(numbers)) * size]


def _bytes(joined: pa.Array) -> bytes:
    """The bytes of all values, one after the other."""
    if not len(joined):
        return b""
    _, offsets, data = joined.buffers()
    ends = memoryview(offsets).cast("i")
    first, last = ends[joined.offset], ends[joined.offset + len(joined)]
    return memoryview(data)[first:last].tobytes()
