"""Batches of payloads as the arrays that the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from postbus.errors import BadArgument
from postbus.serializers import Codec

_json = msgspec.json.Encoder().encode


def headers_of(headers: dict[str, Any] | None, name: str) -> str | None:
    """Headers as JSON text."""
    if headers is None:
        return None
    try:
        return _json(headers).decode()
    except TypeError as exc:
        raise BadArgument(f"the headers of a message to {name!r} are not JSON: {exc}") from exc


def moment(what: str, value: datetime | None) -> datetime | None:
    """A time as it is, if it is clear which one it is."""
    if value is not None and value.utcoffset() is None:
        raise BadArgument(
            f"{what} needs a time zone: {value.isoformat()} is a different time in each",
            hint="Give datetime.now(UTC) + timedelta(...), or the like.",
        )
    return value


def _each(what: str, name: str, value: Any, count: int) -> list[Any]:
    given = list(value)
    if len(given) != count:
        raise BadArgument(f"a batch to {name!r} has {count} payloads but {len(given)} {what}")
    return given


def batch_of(
    codec: Codec,
    name: str,
    payloads: Sequence[Any],
    *,
    type: str | Sequence[str],
    key: str | Sequence[str | None] | None,
    headers: dict[str, Any] | Sequence[dict[str, Any] | None] | None,
) -> tuple[str, list[Any], list[str] | None, list[str | None] | None, list[str | None] | None]:
    """The kind of the payloads, and the arrays payloads, types, keys and headers."""
    count = len(payloads)
    try:
        data = codec.encode_all(payloads)
    except BadArgument as exc:
        raise BadArgument(f"a batch to {name!r}: {exc.message}", hint=exc.hint) from exc
    types = (
        None
        if type == "default"
        else [type] * count
        if isinstance(type, str)
        else _each("types", name, type, count)
    )
    keys = None if key is None else [key] * count if isinstance(key, str) else _each("keys", name, key, count)
    heads: list[str | None] | None
    if headers is None or isinstance(headers, dict):
        same = headers_of(codec.headers(headers), name)
        heads = None if same is None else [same] * count
    else:
        heads = [headers_of(codec.headers(h), name) for h in _each("headers", name, headers, count)]
    return ("text" if isinstance(data[0], str) else "bytea"), data, types, keys, heads
