"""Calls with the plan of every statement in them: auto_explain reports those inside functions too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.queue.work import Desk

# Tables that grow. Nothing may read one of them from end to end.
LARGE = {"queued", "key_state", "key_wake", "mark"}
# Blocks: what a call takes that finds nothing, and what each message adds. A message has a row and an entry
# in an index or two, written anew at the other end; an index of a million is three or four blocks deep.
CALL, MESSAGE = 40, 20
_SETTINGS = {
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_nested_statements": "on",
    "auto_explain.log_analyze": "on",
    "auto_explain.log_buffers": "on",
    "auto_explain.log_timing": "off",
    "auto_explain.log_format": "json",
    "client_min_messages": "log",
}


@dataclass(frozen=True)
class Plan:
    """One statement as it ran."""

    text: str
    top: dict[str, Any]

    def nodes(self) -> Iterator[dict[str, Any]]:
        todo = [self.top]
        while todo:
            node = todo.pop()
            yield node
            todo += node.get("Plans", [])

    @property
    def blocks(self) -> int:
        return int(self.top["Shared Hit Blocks"] + self.top["Shared Read Blocks"])


@dataclass(frozen=True)
class Run:
    """A call: what it returned, and the plan of every statement it ran; the call itself is the last."""

    result: list[Any]
    plans: list[Plan]

    @property
    def blocks(self) -> int:
        return self.plans[-1].blocks

    def paths(self, table: str) -> set[str]:
        """How rows of a table were found: by these indexes, or by their place in the table (Tid Scan)."""
        return {
            node.get("Index Name", node["Node Type"])
            for plan in self.plans
            for node in plan.nodes()
            if node.get("Relation Name") == table and node["Node Type"] != "ModifyTable"
        }

    def rows(self, index: str) -> int:
        """Rows that came out of an index, wanted or not."""
        return sum(
            round((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
            for plan in self.plans
            for node in plan.nodes()
            if node.get("Index Name") == index
        )

    def check(self, messages: int, factor: float = 1) -> Run:
        """Nothing large was read from end to end or sorted, and the blocks are those of so many messages."""
        for plan in self.plans:
            for node in plan.nodes():
                read_whole = node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan")
                assert not (read_whole and node["Relation Name"] in LARGE), f"{node}\n{plan.text}"
                rows = node["Actual Rows"] + node.get("Rows Removed by Join Filter", 0)
                assert rows * node["Actual Loops"] <= 10 * messages + 200, f"{node}\n{plan.text}"
        assert self.blocks <= factor * (CALL + MESSAGE * messages), self.describe()
        return self

    def describe(self) -> str:
        costs = sorted(((p.blocks, " ".join(p.text.split())[:150]) for p in self.plans), reverse=True)
        return "\n".join(f"{blocks:6} {text}" for blocks, text in costs[:12])


def explained(s: Desk, call: Callable[..., Any], *args: Any, **options: Any) -> Run:
    """Make a call of the session and hear the plans."""
    plans: list[Plan] = []

    def hear(diag: psycopg.errors.Diagnostic) -> None:
        _, found, plan = (diag.message_primary or "").partition("plan:\n")
        if found:
            told = json.loads(plan)
            plans.append(Plan(told["Query Text"], told["Plan"]))

    s.rows("load 'auto_explain'")
    s.conn.add_notice_handler(hear)
    try:
        for name, value in _SETTINGS.items():
            s.rows("select set_config(%s, %s, false)", name, value)
        plans.clear()
        result = call(*args, **options)
        taken = plans[:]
    finally:
        s.conn.remove_notice_handler(hear)
        for name in _SETTINGS:
            s.rows(f"reset {name}")
    return Run(result if isinstance(result, list) else [result], taken)
