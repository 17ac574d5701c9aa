"""What commands print: tables for people, JSON for programs, messages one by one."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

# Where nobody's screen sets the limit, tables are as wide as they need to be.
_WIDE = 220


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leave it to the one place that ends commands."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output; colours only on a terminal."""
    return _Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def notes() -> Console:
    """Standard error, for everything that is not the result."""
    return _Console(stderr=True, width=None if sys.stderr.isatty() else _WIDE, highlight=False)


def done(text: str) -> None:
    """Say in one line what was done."""
    console().print(Text(text), soft_wrap=True)


def table(columns: Mapping[str, str], rows: Sequence[Row], *, title: str | None = None, empty: str) -> None:
    """Print rows under headings (key of the row: heading), or one line when there are none."""
    if not rows:
        done(empty)
        return
    grid = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for key, heading in columns.items():
        found = [row[key] for row in rows if row[key] is not None]
        right = bool(found) and all(
            isinstance(v, int | float | timedelta) and not isinstance(v, bool) for v in found
        )
        grid.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(short(row[key])) for key in columns))
    console().print(grid)


def short(value: Any) -> str:
    """One value for a table cell."""
    match value:
        case None:
            text = "-"
        case bool():
            text = "yes" if value else "no"
        case timedelta():
            text = _duration(value)
        case datetime():
            text = value.isoformat(sep=" ", timespec="seconds")
        case dict() | list():
            text = json.dumps(value, ensure_ascii=False)
        case bytes():
            text = f"<{len(value)} bytes>"
        case _:
            text = str(value)
    return visible(text)


def _duration(value: timedelta) -> str:
    seconds = value.total_seconds()
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    parts = []
    rest = round(seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def plain(value: Any) -> Any:
    """One value for JSON: timestamps in ISO 8601 (UTC), intervals in seconds, bytes in base64."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes():
            return base64.b64encode(value).decode()
    return value


def json_list(rows: Iterable[Row]) -> None:
    """Print rows as one JSON array."""
    print(json.dumps([{k: plain(v) for k, v in row.items()} for row in rows], indent=2, ensure_ascii=False))


def json_line(row: Row) -> None:
    """Print one row as one line of JSON."""
    print(json.dumps({k: plain(v) for k, v in row.items()}, ensure_ascii=False))


def message(row: Row, *, as_json: bool, name: str = "id") -> None:
    """Print one message: a line of JSON, or id (or receipt), type, key and payload for reading."""
    if as_json:
        json_line(row)
        return
    again = f" (attempt {row['attempt']})" if row["attempt"] > 1 else ""
    key = f" {row['key']}" if row["key"] is not None else ""
    body = row["payload"] if row["payload"] is not None else f"<{len(row['blob'])} bytes>"
    print(f"{row[name]} {visible(row['type'])}{visible(key)}{again} {visible(body)}")


def visible(text: str) -> str:
    """The text without what would steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
