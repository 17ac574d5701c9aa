"""Two processes at one table, at the same moment: nothing twice, nothing lost."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from postbus.lake import LakeTable, _rewrite
from tests.lake.conftest import Lake, rows

SCHEMA = pa.schema({"id": pa.int64(), "by": pa.string()})
BATCHES = 4
WAIT = 200  # on a busy machine too
ME = ("a", "bb")


def racer(lake: Lake, me: str, turn: Any, answers: Any) -> None:
    """Creates the same tables and commits the same batches as the other process, at the same moments."""

    def opened(name: str) -> LakeTable:
        table = lake.open(name)
        turn.wait(WAIT)
        table.create(SCHEMA, writer="test")
        return table

    try:
        commit_everything(me, turn, answers, opened)
    except BaseException:
        turn.abort()  # the other one need not wait
        raise


def commit_everything(me: str, turn: Any, answers: Any, opened: Callable[[str], LakeTable]) -> None:
    same, apart, merged = opened("same"), opened("apart"), opened("merged")
    for batch in range(BATCHES):
        rows = pa.table({"id": [batch], "by": [me]}, schema=SCHEMA)
        for table, query in ((same, "both"), (apart, me)):
            files = table.write(rows)
            turn.wait(WAIT)
            answers.put((table.name, batch, table.append(files, SCHEMA, query, batch)))
        # Everybody has a row of his own, and both want the row 0.
        changes = pa.table({"id": [0, 1 + len(me)], "by": [me, f"{me}{batch}"], "_op": ["upsert"] * 2})
        turn.wait(WAIT)
        answers.put((merged.name, batch, merged.merge(changes, ["id"], me, batch)))


@pytest.mark.timeout(400)
def test_two_processes_at_the_same_moment(lake: Lake) -> None:
    spawn = multiprocessing.get_context("spawn")
    turn, answers = spawn.Barrier(2), spawn.Queue()
    both = [spawn.Process(target=racer, args=(lake, me, turn, answers)) for me in ME]
    for process in both:
        process.start()
    said = [answers.get(timeout=WAIT) for _ in range(2 * 3 * BATCHES)]
    for process in both:
        process.join(WAIT)
        assert process.exitcode == 0

    def of(table: str) -> list[Any]:
        found = rows(lake.open(table).read())
        assert found == rows(lake.elsewhere(table))
        return found

    # A batch of one query, as of a driver and the one that took its place: one of them commits it.
    for batch in range(BATCHES):
        assert sorted(done for t, b, done in said if (t, b) == ("same", batch)) == [False, True]
    assert [number for number, _ in of("same")] == list(range(BATCHES))
    # Two queries: both of them commit everything.
    assert all(done for t, _, done in said if t != "same")
    assert of("apart") == sorted((batch, me) for batch in range(BATCHES) for me in ME)
    shared, *own = of("merged")
    assert shared in [(0, me) for me in ME]
    assert own == [(2, f"a{BATCHES - 1}"), (3, f"bb{BATCHES - 1}")]


@pytest.mark.parametrize("meanwhile", ["append", "merge"])
def test_others_commit_while_files_are_put_together(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    table = lake.table(SCHEMA)
    for n in range(3):
        table.append(table.write(pa.table({"id": [n], "by": ["old"]}, schema=SCHEMA)), SCHEMA)
    rewritten, commits = [], []
    commit, compacted = type(table)._commit, _rewrite.compacted

    def other() -> None:
        new = pa.table({"id": [1, 9], "by": ["new"] * 2})
        if meanwhile == "append":
            lake.open().append(table.write(new), new.schema)
        else:
            lake.open().merge(new.append_column("_op", pa.array(["upsert"] * 2)), ["id"], "other", 1)

    def late(self: Any, change: Any) -> None:
        commits.append(change)
        if len(commits) == 1:
            other()
        commit(self, change)

    def counted(*args: Any) -> Any:
        rewritten.append(1)
        return compacted(*args)

    monkeypatch.setattr(type(table), "_commit", late)
    monkeypatch.setattr(_rewrite, "compacted", counted)
    table.compact()
    expected = [(0, "old"), (1, "new"), (1, "old"), (2, "old"), (9, "new")]
    if meanwhile == "merge":
        expected.remove((1, "old"))
    assert rows(table.read()) == rows(lake.elsewhere()) == expected
    # Only where others have taken files out must it begin anew.
    assert len(rewritten) == (1 if meanwhile == "append" else 2)
    assert len(commits) == 3
