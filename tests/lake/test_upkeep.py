"""Compaction and vacuum change the files and never the rows."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from postbus.errors import AlreadyExists
from postbus.lake import LakeTable
from tests.conftest import Database
from tests.lake.conftest import Lake, rows

SCHEMA = pa.schema({"stream": pa.string(), "n": pa.int64(), "blob": pa.binary()})
NOW = timedelta(0)


def filled(lake: Lake, batches: int = 6) -> LakeTable:
    table = lake.table(SCHEMA, "stream")
    for n in range(batches):
        part = pa.table({"stream": ["a/b", None], "n": [n, -n], "blob": [b"\0", None]}, schema=SCHEMA)
        table.append(table.write(part), SCHEMA, "q", n)
    return table


def on_disk(lake: Lake) -> list[Path]:
    return sorted((lake.folder / "events").rglob("*.parquet"))


def aged(*files: Path, hours: float = 24 * 30) -> None:
    then = time.time() - 3600 * hours
    for file in files:
        os.utime(file, (then, then))


def test_compaction(lake: Lake) -> None:
    table = filled(lake)
    before, version = rows(table.read()), table.version()
    done = table.compact()
    assert (done.files_before, done.files_after, done.rows) == (12, 2, 12)
    assert len(table.files()) == 2
    assert rows(table.read()) == rows(lake.elsewhere()) == before
    assert table.done("q") == 5, "the record of batches stays"
    assert rows(lake.open(version=version).read()) == before, "old versions are read as before"
    again = table.compact()
    assert (again.files_before, again.files_after) == (0, 0), "nothing is left to do"
    wide = pa.table({"stream": ["a/b"], "n": [99], "more": ["x"]})
    table.append(table.write(wide), wide.schema, "q", 6)
    assert table.compact().files_before == 2, "files of different columns are put together too"
    assert rows(table.read(), "n", "more")[-1] == (99, "x")
    assert table.read().num_rows == lake.elsewhere().num_rows == 13


def test_vacuum_deletes_what_nobody_needs(lake: Lake) -> None:
    table = filled(lake)
    table.compact()
    orphan = Path(table.place.path(table.write(pa.table({"n": [1], "stream": ["a/b"]}))[0].path))
    live = {Path(table.place.path(f.path)) for f in table.files()}
    before = rows(table.read())
    # By default everything young stays: versions that somebody reads, files that somebody is about to commit.
    assert table.vacuum().files == 0
    assert len(on_disk(lake)) == 12 + 2 + 1
    # An orphan that is old goes, a young one does not, and nor do files of young versions.
    aged(orphan, *live, *(f for f in on_disk(lake) if f not in live))
    young = Path(table.place.path(table.write(pa.table({"n": [2], "stream": ["a/b"]}))[0].path))
    done = table.vacuum()
    assert not orphan.exists()
    assert young.exists()
    assert done.files == 1
    assert done.bytes > 0
    assert len(on_disk(lake)) == 12 + 2 + 1
    assert rows(table.read()) == rows(lake.elsewhere()) == before
    # Told to keep nothing, it deletes all but the newest version.
    table.vacuum(NOW)
    assert set(on_disk(lake)) == live
    assert rows(table.read()) == rows(lake.elsewhere()) == before
    table.append(table.write(pa.table({"n": [7], "stream": ["c"]})), SCHEMA, "q", 6)
    assert table.append([], SCHEMA, "q", 5) is False
    assert len(rows(lake.elsewhere())) == len(before) + 1


def test_files_written_before_a_vacuum_are_committed_after_it(lake: Lake) -> None:
    table = filled(lake, 1)
    files = table.write(pa.table({"n": [5], "stream": ["late"]}))
    lake.open().vacuum(timedelta(hours=1))
    assert table.append(files, SCHEMA, "q", 1) is True
    assert rows(lake.elsewhere(), "n") == [0, 0, 5]


def test_iceberg_forgets_old_snapshots_by_itself(
    tmp_path: Path, emptydb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from postbus.lake import _iceberg

    monkeypatch.setattr(_iceberg, "SNAPSHOTS", 4)
    lake = Lake(tmp_path, "iceberg", emptydb.dsn)
    table = filled(lake, 4)
    table.merge(pa.table({"n": [0, 9], "_op": ["delete", "upsert"]}), ["n"], "m", 0)
    merged = table.version()
    for n in range(4, 14):
        table.append(table.write(pa.table({"stream": ["x"], "n": [n]})), SCHEMA, "q", n)
    shots = table._table().metadata.snapshots  # type: ignore[attr-defined]
    assert len(shots) <= 7
    assert merged not in [s.snapshot_id for s in shots], "the merge is forgotten: an append followed"
    assert 4 in [s.sequence_number for s in shots], "what it took out is still known"
    assert rows(table.read()) == rows(lake.elsewhere())
    assert table.read().num_rows == 6 + 1 + 10
    assert table.vacuum().files == 0
    assert (table.done("q"), table.done("m")) == (13, 0)


def test_a_table_is_dropped_and_made_again(lake: Lake) -> None:
    table = filled(lake, 1)
    with pytest.raises(AlreadyExists, match="is written by 'test', not by 'me'"):
        table.drop("me")
    assert table.drop("test") is True
    assert not (lake.folder / "events").exists()
    assert table.exists() is lake.open().exists() is table.drop("test") is False
    other = pa.schema({"n": pa.string()})
    table.create(other, writer="me")
    table.append(table.write(pa.table({"n": ["x"]})), other, "q", 0)
    assert rows(lake.open().read()) == rows(lake.elsewhere()) == [("x",)]
