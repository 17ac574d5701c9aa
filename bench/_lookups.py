"""What the engine's hot lookups cost, and how many dead rows its tables hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench._database import Connection
from bench._stats import median

# Single statements of consume, ack and tick, with the settings that those functions run under.
_SETTINGS = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
_LOOKUPS = {
    "progress, newest row": """
        select p.* from postbus.progress p where p.slot_id = {slot}
        order by p.slot_id desc, p.n desc limit 1""",
    "lease, by token": "select l.* from postbus.lease l where l.token = {token}",
    "tick, newest": """
        select t.* from postbus.tick t where t.stream_id = {stream}
        order by t.stream_id desc, t.id desc limit 1""",
    "tick, by id": "select t.* from postbus.tick t where t.stream_id = {stream} and t.id = {tick}",
    "tick, floor": """
        select t.lo from postbus.tick t where t.stream_id = {stream}
          and t.own < pg_snapshot_xmax(pg_current_snapshot()) order by t.id desc limit 1""",
    "redelivery, first due": """
        select r.due from postbus.redelivery r where r.slot_id = {slot} and r.token is null
        order by r.slot_id, r.due limit 1""",
    "slot, by id": "select s.* from postbus.slot s where s.id = {slot}",
    "stream, by id": "select s.* from postbus.stream s where s.id = {stream}",
    "group, by id": 'select g.* from postbus."group" g where g.id = {group}',
}
_REPEATS = 7


@dataclass(frozen=True)
class Lookup:
    """One lookup: pages touched, and milliseconds of execution."""

    buffers: int
    ms: float


def measure(conn: Connection, batch: str) -> dict[str, Lookup]:
    """Run every hot lookup for the slot that holds the batch (an open lease)."""
    row = conn.execute(
        "select slot_id, token, stream_id, coalesce(base, 0), group_id from postbus.lease where token = %s",
        [int(batch.lstrip("s"))],
    ).fetchone()
    assert row is not None
    names = dict(zip(("slot", "token", "stream", "tick", "group"), map(int, row), strict=True))
    for setting in _SETTINGS:
        conn.execute("select set_config(%s, 'off', false)", [setting])
    return {lookup: _explain(conn, text.format(**names)) for lookup, text in _LOOKUPS.items()}


def _explain(conn: Connection, statement: str) -> Lookup:
    times, buffers = [], 0
    for _ in range(_REPEATS):
        row = conn.execute(f"explain (analyze, buffers, format json) {statement}".encode()).fetchone()
        assert row is not None
        plan: dict[str, Any] = row[0][0]
        top = plan["Plan"]
        buffers = int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])
        times.append(float(plan["Execution Time"]))
    return Lookup(buffers, median(times))


def dead_rows(conn: Connection, schema: str) -> dict[str, int]:
    """Dead rows per table of a schema, as the statistics have them."""
    rows = conn.execute(
        """select relname, n_dead_tup from pg_stat_user_tables
        where schemaname = %s and n_dead_tup > 0 order by n_dead_tup desc""",
        [schema],
    )
    return {str(name): int(dead) for name, dead in rows}
