"""Payloads as structs: JSON that fits the schema, and null for what does not."""

from __future__ import annotations

import base64
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as t

if TYPE_CHECKING:
    import pyarrow as pa


def parse_payloads(payloads: pa.ChunkedArray, schema: t.StructType) -> pa.Array:
    """One struct per payload. What does not fit its type is null; so is a payload that is no JSON object.

    Arrow's reader does well-formed batches of plain types at once; the rest goes value by value.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_type

    kind = to_arrow_type(schema, timezone="UTC")
    fast = _at_once(payloads, kind) if _plain(schema) else None
    if fast is not None:
        return fast
    return pa.array([_struct(_load(p), schema) for p in payloads.to_pylist()], kind)


def _plain(schema: t.StructType) -> bool:
    """Types that Arrow reads as we do: it guesses nothing and rounds nothing there."""
    plain = (t.StringType, t.LongType, t.DoubleType, t.BooleanType)
    return all(
        isinstance(f.dataType, plain) or (isinstance(f.dataType, t.StructType) and _plain(f.dataType))
        for f in schema.fields
    )


def _at_once(payloads: pa.ChunkedArray, kind: pa.DataType) -> pa.Array | None:
    import pyarrow as pa
    from pyarrow import json as arrow_json

    if payloads.null_count or not len(payloads):
        return None
    lines = payloads.to_pylist()
    if any(not line.startswith("{") or "\n" in line for line in lines):
        return None
    options = arrow_json.ParseOptions(
        explicit_schema=pa.schema(list(kind)), unexpected_field_behavior="ignore"
    )
    data = "\n".join(lines).encode()
    try:
        table = arrow_json.read_json(
            io.BytesIO(data), arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1), options
        )
    except pa.ArrowInvalid:
        return None
    if table.num_rows != len(payloads):
        return None
    return table.select([f.name for f in kind]).to_struct_array().combine_chunks()


def _load(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text, parse_float=Decimal)
    except ValueError:
        return None


def _struct(value: Any, schema: t.StructType) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return {f.name: _fit(value.get(f.name), f.dataType) for f in schema.fields}


def _fit(value: Any, kind: t.DataType) -> Any:  # noqa: PLR0911
    """The value in the type of its column, or None."""
    if value is None:
        return None
    try:
        if isinstance(kind, t.StructType):
            return _struct(value, kind)
        if isinstance(kind, t.ArrayType):
            return [_fit(v, kind.elementType) for v in value] if isinstance(value, list) else None
        if isinstance(kind, t.MapType):
            if not isinstance(value, dict):
                return None
            return [(_fit(k, kind.keyType), _fit(v, kind.valueType)) for k, v in value.items()]
        return _scalar(value, kind)
    except (ValueError, TypeError, OverflowError, InvalidOperation):
        return None


def _scalar(value: Any, kind: t.DataType) -> Any:  # noqa: PLR0911 - one line per type
    if isinstance(kind, t.StringType):
        return value if isinstance(value, str) else _text(value)
    if isinstance(kind, t.BooleanType):
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if isinstance(kind, t.IntegralType):
        return _integer(value, kind)
    if isinstance(kind, t.FractionalType):
        if not isinstance(value, int | Decimal):
            return None
        if isinstance(kind, t.DecimalType):
            fitted = Decimal(value).quantize(Decimal(1).scaleb(-kind.scale))
            return fitted if len(fitted.as_tuple().digits) <= kind.precision else None
        return float(value)
    if not isinstance(value, str):
        return None
    if isinstance(kind, t.DateType):
        return date.fromisoformat(value)
    if isinstance(kind, t.TimestampType):
        at = datetime.fromisoformat(value)
        return at if at.tzinfo else at.replace(tzinfo=UTC)
    if isinstance(kind, t.TimestampNTZType):
        return datetime.fromisoformat(value).replace(tzinfo=None)
    return base64.b64decode(value, validate=True) if isinstance(kind, t.BinaryType) else None


_BITS: dict[type[t.DataType], int] = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}


def _integer(value: Any, kind: t.DataType) -> int | None:
    if not isinstance(value, int):
        return None
    half = 1 << (_BITS[type(kind)] - 1)
    return value if -half <= value < half else None


def _text(value: Any) -> str:
    """A value that is no text, as the JSON it was."""
    return json.dumps(value, default=lambda d: int(d) if d == d.to_integral_value() else float(d))
