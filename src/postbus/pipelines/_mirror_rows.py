"""Changes as typed rows: what a task does with the JSON of captured events. No Spark and no database in here.

Postgres types become those of the lake as docs/reference/mirror.md lists them. Numbers are read as their
text, so that no digit is lost. A value that does not fit its column is null there and kept in `_rescued`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument

if TYPE_CHECKING:
    import pyarrow as pa

RESCUED = "_rescued"
_EXACT = Context(prec=200)


@dataclass(frozen=True)
class Kind:
    """What a column of the lake holds: a name, and for decimals their precision and scale."""

    name: str
    precision: int = 0
    scale: int = 0


@dataclass(frozen=True)
class Shape:
    """The columns of a mirrored table, and which of them are its key."""

    columns: tuple[tuple[str, Kind], ...]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(name for name, _ in self.columns)

    def schema(self) -> pa.Schema:
        """The columns as Arrow has them."""
        import pyarrow as pa

        return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in self.columns])


class Number(str):
    """A number of a JSON text, as it is written there."""

    __slots__ = ()


def arrow_type(kind: Kind) -> pa.DataType:
    """The type of a column in Arrow, and so in the lake."""
    import pyarrow as pa

    if kind.name == "decimal":
        return pa.decimal128(kind.precision, kind.scale)
    return {
        "bool": pa.bool_(),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "timestamp": pa.timestamp("us"),
        "timestamptz": pa.timestamp("us", "UTC"),
        "date": pa.date32(),
        "binary": pa.binary(),
    }.get(kind.name, pa.string())


def kind_of(type_: pa.DataType) -> Kind:
    """The kind of a column that the lake has already."""
    import pyarrow as pa

    if pa.types.is_decimal(type_):
        return Kind("decimal", type_.precision, type_.scale)
    if pa.types.is_timestamp(type_):
        return Kind("timestamp" if type_.tz is None else "timestamptz")
    tests: dict[str, Callable[[pa.DataType], bool]] = {
        "bool": pa.types.is_boolean,
        "int": lambda t: bool(pa.types.is_integer(t) and t.bit_width <= 32),
        "long": pa.types.is_integer,
        "float": pa.types.is_float32,
        "double": pa.types.is_float64,
        "date": pa.types.is_date,
        "binary": lambda t: bool(pa.types.is_binary(t) or pa.types.is_large_binary(t)),
    }
    return Kind(next((name for name, test in tests.items() if test(type_)), "text"))


def read_changes(
    batches: Iterator[pa.RecordBatch], shape: Shape, schema: pa.Schema, final: bool
) -> Iterator[pa.RecordBatch]:
    """Events (id, op, payload, and what else there is) as rows: id, op, row, rescued, unknown, and the rest.

    `rescued` has what did not fit its column, as JSON; `unknown` what has no column in the shape. With
    `final` that is rescued too.
    """
    import pyarrow as pa

    kinds = pa.struct(list(shape.schema()))
    for batch in batches:
        ids, ops = batch.column("id").to_pylist(), batch.column("op").to_pylist()
        read = [
            _change(payload, op, id_, shape, final)
            for payload, op, id_ in zip(batch.column("payload").to_pylist(), ops, ids, strict=True)
        ]
        made = {
            "row": pa.array([r[0] for r in read], kinds),
            "rescued": pa.array([r[1] for r in read], pa.string()),
            "unknown": pa.array([r[2] for r in read], pa.string()),
        }
        columns = [made[f.name] if f.name in made else batch.column(f.name).cast(f.type) for f in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _change(payload: str, op: str, id_: int, shape: Shape, final: bool) -> tuple[Any, str | None, str | None]:
    """The row that a change leaves, what did not fit, and what has no column."""
    if op == "truncate":
        return None, None, None
    change = json.loads(payload, parse_int=Number, parse_float=Number)
    keys = change["key"]
    if not isinstance(keys, dict) or set(keys) != set(shape.keys):
        raise BadArgument(
            f"event {id_}: a change of {change['schema']}.{change['table']} has the key"
            f" {', '.join(keys) if keys else 'of no column'}, and the mirror has {', '.join(shape.keys)}",
            hint="The key of the table is another one now: mirror it again with rebuild (--rebuild).",
        )
    values = {**(change["after"] or {}), **keys}
    row: dict[str, Any] = {}
    rescued: dict[str, Any] = {}
    known = 0
    for name, kind in shape.columns:
        value = values.get(name)
        known += name in values
        if value is None:
            row[name] = None
            continue
        try:
            row[name] = fit(value, kind)
        except (ValueError, TypeError, OverflowError, InvalidOperation):
            if name in keys:
                raise BadArgument(
                    f"event {id_}: the key column {name} has the value {to_json(value)}, which does not fit"
                    f" the type {kind.name} that it has in the lake",
                    hint="If the column has another type now, mirror it again with rebuild (--rebuild).",
                ) from None
            row[name] = None
            rescued[name] = value
    unknown = {} if known == len(values) else {k: v for k, v in values.items() if k not in row}
    if final:
        # A null needs no rescue.
        rescued.update((k, v) for k, v in unknown.items() if v is not None)
        unknown = {}
    return row, to_json(rescued) if rescued else None, to_json(unknown) if unknown else None


def fit(value: Any, kind: Kind) -> Any:
    """A JSON value in the type of its column.

    Raises:
        ValueError: it does not fit (or TypeError, OverflowError, InvalidOperation).
    """
    return _FITS[kind.name](value, kind)


def _text(value: Any, kind: Kind) -> str:
    return str(value) if isinstance(value, str) else to_json(value)


def _json(value: Any, kind: Kind) -> str:
    return to_json(value)


def _bool(value: Any, kind: Kind) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(value: Any, kind: Kind) -> int:
    if not isinstance(value, Number) or len(value) > 20:
        raise TypeError
    number = int(value)
    bits = 31 if kind.name == "int" else 63
    if not -(1 << bits) <= number < 1 << bits:
        raise OverflowError
    return number


def _float(value: Any, kind: Kind) -> float:
    # NaN and the infinities are texts in JSON; other texts are none of ours.
    if isinstance(value, Number) or value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise TypeError


def _decimal(value: Any, kind: Kind) -> Decimal:
    if not isinstance(value, Number):
        raise TypeError
    number = Decimal(value)
    scaled = number.quantize(Decimal((0, (1,), -kind.scale)), context=_EXACT)
    if scaled != number or (scaled and scaled.adjusted() >= kind.precision - kind.scale):
        raise OverflowError
    return scaled


def _timestamp(value: Any, kind: Kind) -> datetime:
    found = datetime.fromisoformat(_string(value))
    if (found.tzinfo is None) != (kind.name == "timestamp"):
        raise ValueError
    return found if found.tzinfo is None else found.astimezone(UTC)


def _date(value: Any, kind: Kind) -> date:
    return date.fromisoformat(_string(value))


def _binary(value: Any, kind: Kind) -> bytes:
    if not _string(value).startswith("\\x"):
        raise ValueError
    return bytes.fromhex(value[2:])


def _string(value: Any) -> str:
    """A text of JSON; a number that looks like a date is none."""
    if isinstance(value, Number) or not isinstance(value, str):
        raise TypeError
    return value


_FITS: dict[str, Callable[[Any, Kind], Any]] = {
    "text": _text,
    "json": _json,
    "bool": _bool,
    "int": _integer,
    "long": _integer,
    "float": _float,
    "double": _float,
    "decimal": _decimal,
    "timestamp": _timestamp,
    "timestamptz": _timestamp,
    "date": _date,
    "binary": _binary,
}


def to_json(value: Any) -> str:
    """JSON text as jsonb prints it, with numbers as they were written."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(k)}: {to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(to_json(v) for v in value) + "]"
    return _quoted(value)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
