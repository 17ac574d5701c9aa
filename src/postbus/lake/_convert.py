"""Values of JSON as values of a column: without loss, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import pyarrow as pa


class NoFit(Exception):  # noqa: N818 - not an error: the value goes elsewhere
    """The value is not one of the column's type."""


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise NoFit


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    raise NoFit


def _integer(bits: int) -> Callable[[Any], int]:
    limit = 2 ** (bits - 1)

    def convert(value: Any) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # 10.0 is how some languages write 10
        if isinstance(value, int) and not isinstance(value, bool) and -limit <= value < limit:
            return value
        raise NoFit

    return convert


def _double(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53:
        return float(value)
    raise NoFit


def _decimal(kind: pa.DataType) -> Callable[[Any], Decimal]:
    def convert(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise NoFit
        try:
            found = Decimal(str(value))
            pa.scalar(found, kind)
        except (InvalidOperation, pa.ArrowInvalid, ValueError):
            raise NoFit from None
        return found

    return convert


def _timestamp(zoned: bool) -> Callable[[Any], datetime]:
    def convert(value: Any) -> datetime:
        try:
            found = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            raise NoFit from None
        if zoned is (found.tzinfo is None):
            raise NoFit
        return found.astimezone(UTC) if zoned else found

    return convert


def _date(value: Any) -> date:
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise NoFit from None


def _nothing(value: Any) -> Any:
    raise NoFit


def converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """What makes a value of this type of a value of JSON; it raises `NoFit`."""
    t = pa.types
    found: Callable[[Any], Any] = _nothing
    if t.is_signed_integer(kind):
        found = _integer(kind.bit_width)
    elif t.is_decimal(kind):
        found = _decimal(kind)
    elif t.is_timestamp(kind):
        found = _timestamp(kind.tz is not None)
    plain = {pa.string(): _text, pa.bool_(): _boolean, pa.float64(): _double, pa.date32(): _date}
    return plain.get(kind, found)


def kind_of(value: Any) -> pa.DataType | None:
    """The type of a new column whose first value this is; none if there is no fitting one."""
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        return pa.float64()
    return pa.string() if isinstance(value, str | dict | list) else None


def converted(values: list[Any], kind: pa.DataType | None) -> tuple[pa.Array, dict[int, Any]]:
    """A column of this type, and the values that are not in it, by their row: all, where there is no type."""
    convert = None if kind is None else converter(kind)
    kept: list[Any] = [None] * len(values)
    lost: dict[int, Any] = {}
    for at, value in enumerate(values):
        if value is None:
            continue
        try:
            if convert is None:
                raise NoFit
            kept[at] = convert(value)
        except NoFit:
            lost[at] = value
    return pa.array(kept, kind), lost
