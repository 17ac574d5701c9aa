"""A merged table equals what the changes make of it, in one commit per batch."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from postbus.errors import BadArgument
from postbus.lake import LakeTable
from tests.lake.conftest import Lake, rows

SCHEMA = pa.schema({"shop": pa.string(), "id": pa.int64(), "name": pa.string(), "n": pa.int64()})


def changes(*rows: tuple[str, str, int, str | None, int | None]) -> pa.Table:
    names = ["_op", *SCHEMA.names]
    kinds = pa.schema([pa.field("_op", pa.string()), *SCHEMA])
    return pa.Table.from_pylist([dict(zip(names, r, strict=True)) for r in rows], kinds)


def commits(table: LakeTable) -> int:
    if table.format == "delta":
        return int(table.version() or 0)
    return len(table._table().metadata.snapshots)  # type: ignore[attr-defined]


@pytest.mark.parametrize("partition_by", [(), ("shop",)], ids=["flat", "partitioned"])
def test_random_changes(lake: Lake, partition_by: tuple[str, ...]) -> None:
    chance = random.Random(7)
    table = lake.table(SCHEMA, *partition_by)
    model: dict[tuple[str, int], tuple[Any, ...]] = {}
    for batch in range(14):
        truncate = batch in (6, 11)
        if truncate:
            model.clear()
        batch_rows: list[tuple[str, str, int, str | None, int | None]] = []
        keys = [(shop, i) for shop in ("a", "b/c") for i in range(30)]
        for shop, number in chance.sample(keys, chance.randint(1, 25)):
            if chance.random() < 0.3:
                batch_rows.append(("delete", shop, number, None, None))
                model.pop((shop, number), None)
            else:
                row = (shop, number, chance.choice(["x", "", None]), chance.randint(-9, 9))
                batch_rows.append(("upsert", *row))
                model[shop, number] = row
        before = commits(table)
        assert table.merge(changes(*batch_rows), ["shop", "id"], "m", batch, truncate=truncate) is True
        assert commits(table) == before + 1, "one commit"
        assert table.merge(changes(*batch_rows), ["shop", "id"], "m", batch, truncate=truncate) is False
        assert rows(table.read()) == sorted(model.values(), key=repr) or rows(table.read()) == sorted(
            model.values()
        ), f"batch {batch}"
    assert rows(lake.elsewhere()) == rows(table.read())
    assert table.done("m") == 13


def test_a_truncate_alone_and_nothing_at_all(lake: Lake) -> None:
    table = lake.table(SCHEMA)
    table.merge(changes(("upsert", "a", 1, "x", 1)), ["id"], "m", 0)
    before = commits(table)
    assert table.merge(changes(), ["id"], "m", 1) is True
    assert commits(table) == before, "nothing to write down"
    assert table.merge(changes(), ["id"], "m", 2, truncate=True) is True
    assert table.read().num_rows == lake.elsewhere().num_rows == 0
    assert table.done("m") == 2
    assert table.merge(changes(("delete", "a", 1, None, None)), ["id"], "m", 3) is True
    table.merge(changes(("upsert", "a", 2, "y", 2)), ["id"], "m", 4, truncate=True)
    assert rows(lake.elsewhere()) == [("a", 2, "y", 2)]


def test_new_columns_and_missing_ones(lake: Lake) -> None:
    table = lake.table(SCHEMA)
    table.merge(changes(("upsert", "a", 1, "x", 1), ("upsert", "a", 2, "y", 2)), ["id"], "m", 0)
    wide = pa.table({"_op": ["upsert"], "id": [2], "colour": ["red"]})
    table.merge(wide, ["id"], "m", 1)
    expected = [("a", 1, "x", 1, None), (None, 2, None, None, "red")]
    assert rows(table.read()) == rows(lake.elsewhere()) == sorted(expected, key=repr)


def test_files_without_a_changed_key_stay(lake: Lake) -> None:
    table = lake.table(SCHEMA)
    for start in (0, 100):
        part = changes(*(("upsert", "a", start + i, "x", i) for i in range(50)))
        table.merge(part, ["id"], "m", start)
    before = {f.path for f in table.files()}
    table.merge(changes(("upsert", "a", 120, "new", 0)), ["id"], "m", 200)
    after = {f.path for f in table.files()}
    assert len(before) == 2
    assert len(before & after) == 1, "only the file with the key was written anew"
    # Not in any file, though within the bounds of one.
    table.merge(changes(("delete", "a", 49, None, None)), ["id"], "m", 201)
    table.merge(changes(("delete", "a", 49, None, None)), ["id"], "m", 202)
    assert table.read().num_rows == 99


def test_bad_changes(lake: Lake) -> None:
    table = lake.table(SCHEMA)
    good = ("upsert", "a", 1, "x", 1)
    for bad, on, words in (
        (changes(good, good), ["id"], "have a key twice"),
        (changes(("merge", "a", 1, "x", 1)), ["id"], "must be upsert or delete"),
        (changes(good).drop_columns(["_op"]), ["id"], "need a column '_op'"),
        (changes(good), ["nr"], "need a column 'nr'"),
        (changes(good).set_column(2, "id", pa.nulls(1, pa.int64())), ["id"], "is null"),
        (changes(good).set_column(4, "n", pa.array(["1"])), ["id"], "column 'n' of lake table events"),
    ):
        with pytest.raises(BadArgument, match=words):
            table.merge(bad, on, "m", 0)
    assert table.done("m") is None
