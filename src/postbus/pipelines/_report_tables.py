"""The tables of a report in the lake: each is replaced as a whole, in one commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from postbus.pipelines._report_data import Scope
from postbus.pipelines._report_figures import Figures

if TYPE_CHECKING:
    from postbus.lake import LakeTable
    from postbus.pipelines._runs import Recorder

TEXT, COUNT, REAL, TIME = pa.string(), pa.int64(), pa.float64(), pa.timestamp("us", tz="UTC")
RUN = "run"
_SPREAD = {"p50": REAL, "p95": REAL, "p99": REAL, "max": REAL}

# Columns by table, and those of them that a row is known by.
TABLES: dict[str, tuple[dict[str, pa.DataType], tuple[str, ...]]] = {
    "throughput": (
        {"kind": TEXT, "name": TEXT, "begins": TIME, "messages": COUNT, "per_second": REAL},
        ("kind", "name", "begins"),
    ),
    "types": (
        {
            "stream": TEXT, "type": TEXT, "rank": COUNT, "events": COUNT, "share": REAL, "first": TIME,
            "last": TIME,
        },
        ("stream", "type"),
    ),
    "keys": (
        {
            "stream": TEXT, "key": TEXT, "rank": COUNT, "events": COUNT, "share": REAL, "sessions": COUNT,
            "first": TIME, "last": TIME,
        },
        ("stream", "key"),
    ),
    "sessions": (
        {"stream": TEXT, "length": TEXT, "sessions": COUNT, "keys": COUNT, "events": COUNT, **_SPREAD},
        ("stream", "length"),
    ),
    "latency": (
        {
            "kind": TEXT, "name": TEXT, "group": TEXT, "outcome": TEXT, "period": TEXT, "begins": TIME,
            "messages": COUNT, **_SPREAD,
        },
        ("kind", "name", "group", "outcome", "period", "begins"),
    ),
    "errors": (
        {
            "kind": TEXT, "name": TEXT, "group": TEXT, "period": TEXT, "begins": TIME, "dead_letters": COUNT,
            "finished": COUNT, "events": COUNT, "retries": COUNT, "rate": REAL, "reason": TEXT,
        },
        ("kind", "name", "group", "period", "begins"),
    ),
}  # fmt: skip


def open_tables(scope: Scope, pipeline: str) -> dict[str, LakeTable]:
    """The tables, made where they are missing.

    Raises:
        AlreadyExists: another report writes them.
    """
    from postbus.lake import open_table

    found: dict[str, LakeTable] = {}
    if scope.lake is not None:
        for name, (columns, _) in TABLES.items():
            table = open_table(scope.lake, f"report_{name}", format=scope.format, dsn=scope.dsn)
            table.create(pa.schema({**columns, RUN: COUNT}), writer=f"report.{pipeline}")
            found[name] = table
    return found


def write_tables(tables: dict[str, LakeTable], found: Figures, run: Recorder) -> None:
    """Replace what is in them. All rows of one report have its run."""
    for name, table in tables.items():
        columns, on = TABLES[name]
        rows: list[dict[str, Any]] = [{**row, RUN: run.id} for row in getattr(found, name)]
        changes = pa.Table.from_pylist(rows, pa.schema({**columns, RUN: COUNT}))
        changes = changes.append_column("_op", pa.array(["upsert"] * len(rows), TEXT))
        # A number of its own, not that of the run: a lake can outlive the database that counts runs.
        writer = f"report.{run.pipeline}"
        table.merge(changes, on, writer, (table.done(writer) or 0) + 1, truncate=True)
