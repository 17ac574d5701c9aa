"""A captured database: a stream, a group that reads it, and the naive consumer the events are made for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from tests.conftest import Database

Event = dict[str, Any]


@dataclass
class Lab:
    """One connection, one stream `cdc`, and a mirror that upserts `after` and deletes by key, in order."""

    db: Database
    conn: psycopg.Connection[Any]
    rows: dict[tuple[str, str], Event] = field(default_factory=dict)

    def run(self, *statements: LiteralString) -> None:
        for statement in statements:
            self.conn.execute(statement)

    def value(self, query: LiteralString, *args: Any) -> Any:
        row = self.conn.execute(query, args).fetchone()
        return None if row is None else row[0]

    def create(self, lanes: int = 1, ordering: str = "stream") -> None:
        self.value("select postbus.create_stream('cdc', %s::jsonb)", json.dumps({"lanes": lanes}))
        self.value(
            "select postbus.create_group('cdc', 'mirror', %s::jsonb)", json.dumps({"ordering": ordering})
        )

    def events(self) -> list[Event]:
        """Everything new, applied to the mirror on the way."""
        found: list[Event] = []
        idle = 0
        while idle < 3:
            rows = self.conn.execute("select * from postbus.consume('cdc', 'mirror', 500)").fetchall()
            idle = 0 if rows else idle + 1
            for row in rows:
                event = json.loads(row[3])
                assert event["op"] == row[1]
                found.append({"event_key": row[2], **event})
                self.apply(found[-1])
            if rows:
                self.conn.execute("select postbus.ack(%s)", (rows[0][9],))
        return found

    def apply(self, event: Event) -> None:
        table, key = event["table"], event["event_key"]
        if event["op"] == "truncate":
            for place in [p for p in self.rows if p[0] == table and self._in_lane(p[1], event)]:
                del self.rows[place]
        elif event["op"] == "delete":
            self.rows.pop((table, key), None)
        else:
            self.rows[table, key] = event["after"]

    def _in_lane(self, key: str, event: Event) -> bool:
        lane = self.value("select postbus._lane(%s, 0, %s)", key, event["lanes"])
        return bool(lane == event["lane"])

    def brief(self) -> list[str]:
        return [f"{e['op']} {e['event_key']}" for e in self.events()]

    def check(self, *tables: str) -> None:
        """The mirror holds what the tables hold."""
        self.events()
        for table in tables:
            query = sql.SQL("select to_jsonb(t.*) from {} t").format(sql.Identifier(table))
            with psycopg.connect(self.db.dsn, options="-c timezone=UTC") as conn:
                there = [row[0] for row in conn.execute(query).fetchall()]
            mirrored = [row for (name, _), row in self.rows.items() if name == table]
            assert sorted(map(_text, mirrored)) == sorted(map(_text, there)), table


def _text(row: Event) -> str:
    return json.dumps(row, sort_keys=True)


@pytest.fixture
def lab(db: Database) -> Lab:
    lab = Lab(db, db.connect())
    lab.create()
    return lab


@pytest.fixture
def t(lab: Lab) -> Lab:
    """The lab with one captured table t (id, a)."""
    lab.run("create table t (id int primary key, a text)", "select postbus.capture('t', 'cdc')")
    return lab
