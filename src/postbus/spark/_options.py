"""The options of the source: read, checked, with messages that name the option and the remedy."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from postbus.errors import BadArgument
from postbus.spark._ddl import parse_schema

COLUMNS: dict[str, DataType] = {
    "stream": StringType(),
    "id": LongType(),
    "tick": LongType(),
    "lane": IntegerType(),
    "type": StringType(),
    "key": StringType(),
    "payload": StringType(),
    "blob": BinaryType(),
    "headers": StringType(),
    "at": TimestampType(),
}
DATA = "data"  # the payload as a struct, where payloadSchema is set

_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "pushFilters")
_STREAM_ONLY = ("maxEventsPerTrigger", "minEventsPerTrigger", "maxTriggerDelay", "group")
_KNOWN = (
    "dsn", "readFrom", "subscribe", "subscribePattern", "startingOffsets", "startingTimestamp",
    "endingOffsets", "endingTimestamp", "maxEventsPerTrigger", "minEventsPerTrigger", "maxTriggerDelay",
    "minPartitions", "maxEventsPerPartition", "failOnDataLoss", "group", "columns", "payloadSchema", "types",
    "keys", "pushFilters",
)  # fmt: skip
_SPARKS_OWN = ("path", "checkpointlocation", "queryname")  # which a sink is handed too
_BY_LOWER = {name.lower(): name for name in _KNOWN}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|seconds?|m|min|minutes?|h|hours?)?")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}

Positions = (
    str | dict[str, Any]
)  # "earliest", "latest", a timestamp, or one of these or a position per stream


@dataclass(frozen=True)
class Options:
    """What the source was asked for."""

    dsn: str
    read_from: str | None
    subscribe: tuple[str, ...]
    pattern: str | None
    starting: Positions | None  # None: earliest for a batch, latest for a stream
    ending: Positions
    max_per_trigger: int | None
    min_per_trigger: int | None
    max_delay: float
    min_partitions: int
    max_per_partition: int
    fail_on_data_loss: bool
    group: str | None
    columns: tuple[str, ...]
    payload_schema: StructType | None
    types: tuple[str, ...] | None
    keys: tuple[str, ...] | None
    push_filters: bool
    given: frozenset[str]

    @property
    def schema(self) -> StructType:
        """The columns of the source."""
        fields = [StructField(name, COLUMNS[name]) for name in self.columns if name != DATA]
        if self.payload_schema is not None and DATA in self.columns:
            fields.insert(self.columns.index(DATA), StructField(DATA, self.payload_schema))
        return StructType(fields)

    def check_mode(self, streaming: bool) -> None:
        """Refuse options that have no meaning here, rather than ignore them."""
        wrong = [o for o in (_BATCH_ONLY if streaming else _STREAM_ONLY) if o in self.given]
        if wrong:
            raise BadArgument(
                f"option {wrong[0]} is for {'batches' if streaming else 'streams'} only",
                hint=f"Leave it out, or use {'spark.read' if streaming else 'spark.readStream'}.",
            )


def parse(raw: Mapping[str, str]) -> Options:
    """Read the options that Spark hands over. Nothing is asked of the server yet."""
    given = _names(raw)
    dsn = needed_dsn(given)
    schema = parse_schema(given["payloadSchema"]) if "payloadSchema" in given else None
    starting = _positions(given, "startingOffsets", "startingTimestamp")
    return Options(
        dsn=dsn,
        read_from=given.get("readFrom"),
        subscribe=_subscribe(given),
        pattern=_pattern(given),
        starting=starting,
        ending=_positions(given, "endingOffsets", "endingTimestamp") or "latest",
        max_per_trigger=number(given, "maxEventsPerTrigger"),
        min_per_trigger=_min_per_trigger(given),
        max_delay=_duration(given, "maxTriggerDelay", 15 * 60.0),
        min_partitions=number(given, "minPartitions", 100_000) or 1,
        max_per_partition=number(given, "maxEventsPerPartition") or 200_000,
        fail_on_data_loss=_flag(given, "failOnDataLoss", True),
        group=given.get("group"),
        columns=_columns(given, schema),
        payload_schema=schema,
        types=list_of(given, "types"),
        keys=list_of(given, "keys"),
        push_filters=_flag(given, "pushFilters", False),
        given=frozenset(given),
    )


def needed_dsn(given: Mapping[str, str]) -> str:
    """The option dsn, or what stands in for it."""
    dsn = given.get("dsn") or os.environ.get("POSTBUS_DSN")
    if not dsn:
        raise BadArgument("option dsn is missing", hint="Set it, or the environment variable POSTBUS_DSN.")
    return dsn


def sink_options(raw: Mapping[str, str], known: Sequence[str], what: str) -> dict[str, str]:
    """The options of a sink by their names, without those that are Spark's own."""
    by_lower = {name.lower(): name for name in known}
    given: dict[str, str] = {}
    for key, value in raw.items():
        name = by_lower.get(key.lower())
        if name is None and key.lower() not in _SPARKS_OWN:
            raise BadArgument(f"unknown option {key} of {what}", hint=f"Known options: {', '.join(known)}.")
        if name is not None:
            given[name] = value
    return given


def _names(raw: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for key, value in raw.items():
        name = _BY_LOWER.get(key.lower())
        if name is None and key.lower() == "path":
            raise BadArgument(
                "load() takes no path", hint="Name the streams: .option('subscribe', 'orders')."
            )
        if name is None:
            near = difflib.get_close_matches(key.lower(), _BY_LOWER, 1)
            hint = f"Did you mean {_BY_LOWER[near[0]]}? " if near else ""
            raise BadArgument(
                f"unknown option {key}", hint=f"{hint}Known options: {', '.join(sorted(_KNOWN))}."
            )
        given[name] = value
    for one, other in (
        ("subscribe", "subscribePattern"),
        ("startingOffsets", "startingTimestamp"),
        ("endingOffsets", "endingTimestamp"),
    ):
        if one in given and other in given:
            raise BadArgument(f"options {one} and {other} exclude each other", hint="Set one of them.")
    return given


def _subscribe(given: Mapping[str, str]) -> tuple[str, ...]:
    names = list_of(given, "subscribe") or ()
    if not names and "subscribePattern" not in given:
        raise BadArgument(
            "no stream is named",
            hint="Set option subscribe ('orders' or 'orders,refunds') or subscribePattern.",
        )
    return tuple(dict.fromkeys(names))


def _pattern(given: Mapping[str, str]) -> str | None:
    pattern = given.get("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as exc:
            raise BadArgument(
                f"option subscribePattern is not a regular expression: {exc}", detail=pattern
            ) from exc
    return pattern


def list_of(given: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    """A list as a, b, c or as a JSON array, for values with commas in them."""
    if name not in given:
        return None
    text = given[name].strip()
    if text.startswith("["):
        try:
            values = json.loads(text)
        except ValueError as exc:
            raise BadArgument(f"option {name} is not a JSON array: {exc}", detail=text) from exc
        if not all(isinstance(v, str) for v in values):
            raise BadArgument(f"option {name} must hold texts only", detail=text)
        found = tuple(values)
    else:
        found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise BadArgument(f"option {name} is empty", hint="Leave it out, or name something.")
    return found


def _positions(given: Mapping[str, str], offsets: str, timestamp: str) -> Positions | None:
    if timestamp in given:
        try:
            at = datetime.fromisoformat(given[timestamp])
        except ValueError as exc:
            raise BadArgument(
                f"option {timestamp} is not a timestamp: {given[timestamp]}",
                hint="Write it as 2026-01-31T12:00:00+00:00.",
            ) from exc
        if at.tzinfo is None:
            raise BadArgument(
                f"option {timestamp} has no time zone: {given[timestamp]}",
                hint="Add one: 2026-01-31T12:00:00+00:00.",
            )
        return at.isoformat()
    if offsets not in given:
        return None
    text = given[offsets].strip()
    if text in ("earliest", "latest"):
        return text
    hint = 'Use earliest, latest, or JSON such as {"orders": "earliest"} or an offset of a query.'
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise BadArgument(f"option {offsets} is not JSON: {exc}", detail=text, hint=hint) from exc
    if isinstance(value, dict) and isinstance(value.get("streams"), dict):
        value = value["streams"]
    elif isinstance(value, dict) and isinstance(value.get("stream"), str):
        value = {value["stream"]: value}
    if not isinstance(value, dict) or not all(
        isinstance(v, dict) or v in ("earliest", "latest") for v in value.values()
    ):
        raise BadArgument(f"option {offsets} does not say where to begin or end", detail=text, hint=hint)
    return value


def number(given: Mapping[str, str], name: str, most: int = 2**62) -> int | None:
    """A whole number from 1 on; none where the option was left out."""
    if name not in given:
        return None
    text = given[name].strip()
    if not text.isdigit() or not 1 <= int(text) <= most:
        limit = "" if most == 2**62 else f" up to {most}"
        raise BadArgument(f"option {name} must be a whole number from 1{limit}, not {text!r}")
    return int(text)


def _min_per_trigger(given: Mapping[str, str]) -> int | None:
    least, most = number(given, "minEventsPerTrigger"), number(given, "maxEventsPerTrigger")
    if least is not None and most is not None and least > most:
        raise BadArgument(
            f"option minEventsPerTrigger ({least}) is larger than maxEventsPerTrigger ({most})",
            hint="A trigger waits for the first and never takes more than the second.",
        )
    if least is None and "maxTriggerDelay" in given:
        raise BadArgument("option maxTriggerDelay has no meaning without minEventsPerTrigger")
    return least


def _duration(given: Mapping[str, str], name: str, default: float) -> float:
    if name not in given:
        return default
    found = _DURATION.fullmatch(given[name].strip())
    if found is None:
        raise BadArgument(
            f"option {name} is not a time: {given[name]!r}", hint="Write 500ms, 30s, 15m or 1h."
        )
    unit = found[2] or "s"
    return float(found[1]) * _SECONDS["ms" if unit == "ms" else unit[0]]


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise BadArgument(f"option {name} must be true or false, not {given[name]!r}")
    return text == "true"


def _columns(given: Mapping[str, str], schema: StructType | None) -> tuple[str, ...]:
    known = [*COLUMNS, *([DATA] if schema is not None else [])]
    chosen = list_of(given, "columns")
    if chosen is None:
        return tuple(known)
    check: Callable[[str], bool] = known.__contains__
    wrong = next((c for c in chosen if not check(c)), None)
    if wrong == DATA:
        raise BadArgument("option columns names data, which needs option payloadSchema")
    if wrong is not None:
        raise BadArgument(f"option columns names {wrong!r}", hint=f"Columns are {', '.join(known)}.")
    if len(set(chosen)) < len(chosen):
        raise BadArgument("option columns names a column twice", detail=given["columns"])
    return chosen
