"""Fields of JSON as columns; what does not fit is kept."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from postbus.lake import FileWriter, LakeTable
from postbus.lake._expand import Expander
from postbus.lake._schema import RESCUED
from tests.lake.conftest import Lake, rows

GIVEN = pa.schema({"id": pa.int64(), "payload": pa.string()})
ROWS = pa.schema([*GIVEN, pa.field(RESCUED, pa.string())])


def batch(*payloads: Any, first: int = 0) -> pa.RecordBatch:
    texts = [p if isinstance(p, str | None) else json.dumps(p) for p in payloads]
    ids = range(first, first + len(texts))
    return pa.RecordBatch.from_pydict({"id": list(ids), "payload": texts}, GIVEN)


def expanded(*payloads: Any, known: pa.Schema = ROWS, most: int = 500) -> pa.RecordBatch:
    return Expander("payload", GIVEN.names, known, most).expand(batch(*payloads))


def columns(found: pa.RecordBatch) -> dict[str, list[Any]]:
    return {n: found.column(n).to_pylist() for n in found.schema.names if n not in GIVEN.names}


def test_types() -> None:
    found = expanded(
        {"i": 1, "f": 1.5, "b": True, "s": "x", "o": {"a": [1]}, "l": [1, "é"], "n": None, "mixed": 1},
        {"i": -(2**63), "f": 2, "b": None, "s": "", "mixed": 2.5},
    )
    kinds = {f.name: str(f.type) for f in found.schema if f.name not in GIVEN.names}
    assert kinds == {
        "i": "int64", "f": "double", "b": "bool", "s": "string", "o": "string", "l": "string",
        "mixed": "double", RESCUED: "string",
    }  # fmt: skip
    assert columns(found) == {
        "i": [1, -(2**63)], "f": [1.5, 2.0], "b": [True, None], "s": ["x", ""], "o": ['{"a":[1]}', None],
        "l": ['[1,"é"]', None], "mixed": [1.0, 2.5], RESCUED: [None, None],
    }  # fmt: skip


def test_what_does_not_fit_is_rescued() -> None:
    known = pa.schema([*ROWS, pa.field("i", pa.int64()), pa.field("at", pa.timestamp("us", "UTC"))])
    found = expanded(
        {"i": "1", "big": 2**70},
        {"i": 10.0, "at": "2026-05-01T12:00:00+02:00"},
        {"i": True, "at": "yesterday", "new": 1},
        {"i": 2**63, "new": {"a": 1}},
        known=known,
    )
    got = columns(found)
    assert got["i"] == [None, 10, None, None]
    assert str(got["at"][1]) == "2026-05-01 10:00:00+00:00"
    assert got["new"] == [None, None, 1, None]
    assert "big" not in got
    assert [r and json.loads(r) for r in got[RESCUED]] == [
        {"i": "1", "big": 2**70}, None, {"i": True, "at": "yesterday"}, {"i": 2**63, "new": {"a": 1}},
    ]  # fmt: skip


def test_names() -> None:
    found = expanded(
        {"id": "mine", "payload_id": "clash", "Name": 1, "name": 2, "a b": 3, "": 4, "a.b": 5, "_rescued": 6},
        "no json", None, "[1]", '"text"', '{"broken": ', "{}",
    )  # fmt: skip
    got = columns(found)
    assert got["payload_id"][0] == "mine"
    assert got["Name"][0] == 1
    assert got["payload__rescued"][0] == 6
    assert set(got) == {"payload_id", "Name", "payload__rescued", RESCUED}
    assert json.loads(got[RESCUED][0]) == {
        "payload.payload_id": "clash",
        "name": 2,
        "a b": 3,
        "": 4,
        "a.b": 5,
    }
    assert got[RESCUED][1:] == [None] * 6, "what is no object stays in the column itself"


def test_not_more_columns_than_allowed() -> None:
    found = expanded({f"f{n}": n for n in range(10)}, most=6)
    assert found.schema.names == ["id", "payload", "f0", "f1", "f2", RESCUED]
    assert json.loads(found.column(RESCUED)[0].as_py()) == {f"f{n}": n for n in range(3, 10)}


def tasks(table: LakeTable, *batches: pa.RecordBatch) -> list[Any]:
    """Files of tasks that do not know of each other."""
    files = []
    known = table.schema()
    for one in batches:
        expander = Expander("payload", GIVEN.names, known)
        with FileWriter(table.layout) as writer:
            writer.write(expander.expand(one))
        files += writer.files
    return files


def test_tasks_that_disagree(lake: Lake) -> None:
    table = lake.table(ROWS)
    files = tasks(
        table,
        batch({"x": 1, "n": 1, "Same": 1, "t": "a"}),
        batch({"x": "one", "n": 2.5, "same": 2, "t": {"o": 1}}, {"x": "2", "y": True, "n": 3.0}, first=1),
        batch({"y": [1], "n": 2**60}, first=3),
    )
    table.append(files, ROWS, "q", 0)
    schema = table.schema()
    assert [str(schema.field(n).type) for n in ("x", "n", "Same", "t", "y")] == [
        "int64", "double", "int64", "string", "bool"
    ]  # fmt: skip
    got = {r["id"]: r for r in table.read().to_pylist()}
    assert [got[i]["x"] for i in range(4)] == [1, None, None, None]
    assert [got[i]["n"] for i in range(4)] == [1.0, 2.5, 3.0, None]
    assert [got[i]["y"] for i in range(4)] == [None, None, True, None]
    assert got[1]["t"] == '{"o":1}'
    assert [json.loads(got[i][RESCUED] or "null") for i in range(4)] == [
        None, {"x": "one", "same": 2}, {"x": "2"}, {"y": "[1]", "n": 2**60},
    ]  # fmt: skip
    assert rows(lake.elsewhere().select(schema.names)) == rows(table.read())


def test_a_task_that_did_not_know_the_newest_columns(lake: Lake) -> None:
    table = lake.table(ROWS, "id")
    late = tasks(table, batch({"x": "text"}, {"x": "more"}, first=7))
    table.append(tasks(table, batch({"x": 1})), ROWS, "other", 0)
    table.append(late, ROWS, "q", 0)
    got = {r["id"]: (r["x"], r[RESCUED]) for r in table.read().to_pylist()}
    assert got == {0: (1, None), 7: (None, '{"x":"text"}'), 8: (None, '{"x":"more"}')}
    assert rows(lake.elsewhere().select(table.schema().names)) == rows(table.read())
    again = lake.open()
    assert again.append(late, ROWS, "q", 0) is False
