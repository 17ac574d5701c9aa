"""Small words for mirrors: run one, and compare it with the table and with the events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from postbus.lake import LakeTable, open_table
from postbus.pipelines import Run, mirror
from tests.spark.lake import Bench

Row = dict[str, Any]
STREAM = "cdc"


class Lake:
    """A lake and the captured tables of a database."""

    def __init__(self, bench: Bench, folder: Path, lanes: int = 3) -> None:
        self.bench = bench
        self.c = bench.c
        self.dsn = bench.db.dsn
        self.folder = folder
        self.c.execute("select postbus.create_stream(%s, %s)", [STREAM, Jsonb({"lanes": lanes})])

    def sql(self, *statements: LiteralString) -> None:
        for statement in statements:
            self.c.execute(statement)

    def capture(self, *tables: str) -> None:
        for table in tables:
            self.c.execute("select postbus.capture(%s::text::regclass, %s)", [table, STREAM])

    def mirror(self, table: str = "t", **options: Any) -> Run:
        run: Run = mirror(table, lake=self.folder, dsn=self.dsn, spark=self.bench.spark, **options)
        return run

    def table(self, name: str = "t", format: str = "delta") -> LakeTable:
        return open_table(str(self.folder), name, format=format, dsn=self.dsn)

    def rows(self, name: str = "t", format: str = "delta") -> list[Row]:
        """What the lake table holds. A null is as good as a column that is not there."""
        return ordered(self.table(name, format).read().to_pylist())

    def truth(self, table: str = "t") -> list[Row]:
        """What the table holds."""
        with psycopg.connect(self.dsn, row_factory=psycopg.rows.dict_row) as conn:
            return ordered(conn.execute(sql.SQL("select * from {}").format(sql.Identifier(table))).fetchall())

    def check(self, table: str = "t", name: str | None = None, format: str = "delta") -> None:
        """The lake table equals the table."""
        assert self.rows(name or table, format) == self.truth(table)

    def replayed(self, until: Any, table: str = "t") -> list[Row]:
        """What the events up to a position make of the table: the rule of docs/reference/capture.md."""
        since = self.bench.position("earliest", STREAM)
        query = (
            "select r.id, r.type, r.key, r.payload from postbus.plan_window(%s, %s, %s) p,"
            " postbus.read_window(%s, p.part) r order by r.id"
        )
        rows: dict[str, Row] = {}
        for _, type_, key, payload in self.c.execute(query, [STREAM, since, json.dumps(until), STREAM]):
            change = json.loads(payload)
            if change["table"] != table:
                continue
            if type_ == "truncate":
                rows = {}
            elif type_ == "delete":
                rows.pop(key, None)
            else:
                rows[key] = change["after"]
        return ordered(list(rows.values()))

    def again(self, name: str = "t") -> None:
        """As if the driver had died between the merge and its record: Spark runs the last batch again."""
        commits = self.folder / "_postbus" / "checkpoints" / name / "commits"
        last = max((p for p in commits.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        last.unlink()
        (commits / f".{last.name}.crc").unlink(missing_ok=True)


def ordered(rows: list[Row]) -> list[Row]:
    """Without nulls, in a fixed order."""
    plain = [{k: v for k, v in row.items() if v is not None} for row in rows]
    return sorted(plain, key=lambda row: repr(sorted(row.items())))
