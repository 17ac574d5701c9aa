"""Least and greatest values of a Parquet file's columns, for readers that want to skip it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

import pyarrow as pa

LONGEST = 64  # characters of a text that is worth keeping
MOST_COLUMNS = 32


@dataclass
class Stats:
    """By column. A column that is missing is unknown."""

    lower: dict[str, Any] = field(default_factory=dict)
    upper: dict[str, Any] = field(default_factory=dict)
    nulls: dict[str, int] = field(default_factory=dict)


def has_bounds(kind: pa.DataType) -> bool:
    """Floats are left out: what a NaN is less than depends on who asks."""
    t = pa.types
    return bool(t.is_integer(kind) or t.is_date32(kind) or t.is_timestamp(kind) or t.is_string(kind))


def stats_of(metadata: Any, schema: pa.Schema) -> Stats:
    """From the footer of a file."""
    found = Stats()
    columns = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    for name in [f.name for f in schema if f.name in columns][:MOST_COLUMNS]:
        groups = [
            metadata.row_group(g).column(columns[name]).statistics for g in range(metadata.num_row_groups)
        ]
        if any(g is None or not g.has_null_count for g in groups):
            continue
        found.nulls[name] = sum(g.null_count for g in groups)
        if not has_bounds(schema.field(name).type):
            continue
        filled = [g for g in groups if g.num_values > 0]
        if not filled or not all(g.has_min_max for g in filled):
            continue
        low, high = min(g.min for g in filled), max(g.max for g in filled)
        # A cut text would still be a lower bound, but no upper one.
        if not isinstance(low, str) or (len(low) <= LONGEST and len(high) <= LONGEST):
            found.lower[name], found.upper[name] = low, high
    return found


def as_json(value: Any) -> Any:
    """A bound as Delta writes it."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if value.tzinfo else "")
    return value.isoformat() if isinstance(value, date) else value
