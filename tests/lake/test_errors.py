"""Bad input, foreign tables, full disks: a message with the remedy, and nothing half done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from postbus.errors import AlreadyExists, BadArgument, NotFound, PostbusError
from postbus.lake import open_table
from tests.conftest import Database
from tests.lake.conftest import Lake, rows

SCHEMA = pa.schema({"part": pa.string(), "n": pa.int64()})


def test_a_table_of_another_writer(lake: Lake) -> None:
    table = lake.table(SCHEMA, "part")
    assert table.create(SCHEMA, ["part"], writer="test") is False
    with pytest.raises(AlreadyExists, match=r"is written by 'test', not by 'archive\.orders'") as e:
        lake.open().create(SCHEMA, ["part"], writer="archive.orders")
    assert "Choose another table or lake" in str(e.value)
    with pytest.raises(AlreadyExists, match="partitioned by part, not by nothing"):
        lake.open().create(SCHEMA, writer="test")


def test_a_table_of_another_format(tmp_path: Path, emptydb: Database) -> None:
    lakes = [Lake(tmp_path, "delta", None), Lake(tmp_path, "iceberg", emptydb.dsn)]
    for this, other in (lakes, lakes[::-1]):
        this.table(SCHEMA, name=this.format)
        with pytest.raises(AlreadyExists, match=f"is of format {this.format}, not {other.format}"):
            other.open(this.format)


def test_a_table_that_postbus_did_not_make(tmp_path: Path) -> None:
    import deltalake

    deltalake.DeltaTable.create(str(tmp_path / "foreign"), SCHEMA)
    with pytest.raises(AlreadyExists, match="was not made by Postbus"):
        open_table(str(tmp_path), "foreign").create(SCHEMA, writer="me")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "data.csv").write_text("a")
    with pytest.raises(AlreadyExists, match=r"not empty: there is 'data\.csv'"):
        open_table(str(tmp_path), "files").create(SCHEMA, writer="me")


def test_a_table_of_the_same_name_in_another_lake(tmp_path: Path, emptydb: Database) -> None:
    here, there = Lake(tmp_path / "a", "iceberg", emptydb.dsn), Lake(tmp_path / "b", "iceberg", emptydb.dsn)
    table = here.table(SCHEMA)
    table.append(table.write(pa.table({"part": ["a"], "n": [1]})), SCHEMA)
    with pytest.raises(AlreadyExists, match=r"of this database lies at file://.*/a/events, not at"):
        there.open().exists()
    (tmp_path / "a" / "events").rename(tmp_path / "gone")
    with pytest.raises(PostbusError, match="files of the Iceberg table events are missing"):
        here.open().exists()


def test_a_catalog_of_another_database(tmp_path: Path, db: Database, emptydb: Database) -> None:
    table = Lake(tmp_path, "iceberg", db.dsn).table(SCHEMA)
    table.append(table.write(pa.table({"part": ["a"], "n": [1]})), SCHEMA)
    with pytest.raises(AlreadyExists, match="that the catalog of this database does not know"):
        Lake(tmp_path, "iceberg", emptydb.dsn).table(SCHEMA)


def test_bad_arguments(lake: Lake, tmp_path: Path) -> None:
    for name in ("", "a/b", "../up", ".hidden", "x" * 129):
        with pytest.raises(BadArgument, match="no name for a lake table"):
            lake.open(name)
    with pytest.raises(BadArgument, match="lakeFormat must be delta or iceberg, not 'parquet'"):
        open_table(str(tmp_path), "t", format="parquet")
    with pytest.raises(BadArgument, match="option dsn is missing"):
        open_table(str(tmp_path), "t", format="iceberg")
    with pytest.raises(BadArgument, match="option lake is empty"):
        open_table(" ", "t")
    for schema, partition_by, words in (
        (pa.schema({"a": pa.duration("s")}), (), "column 'a' is of type duration"),
        (pa.schema({"a": pa.null()}), (), "column 'a' is of type null"),
        (pa.schema({"a b": pa.int64()}), (), "'a b' is no name for a column"),
        (pa.schema({"a": pa.int64(), "A": pa.int64()}), (), "column 'A' is there twice"),
        (SCHEMA, ("colour",), "partitionBy names 'colour', which the rows do not have"),
        (pa.schema({"x": pa.float64(), "n": pa.int64()}), ("x",), "'x', which is of type double"),
        (SCHEMA, ("n", "n"), "names a column twice"),
        (SCHEMA, ("n", "part"), "no columns but those it is partitioned by"),
    ):
        with pytest.raises(BadArgument, match=words):
            lake.table(schema, *partition_by)
    assert not lake.open().exists()
    for call in (lambda: lake.open().read(), lambda: lake.open().append([], SCHEMA), lake.open().vacuum):
        with pytest.raises(NotFound, match=f"there is no {lake.format} table events in lake"):
            call()


def test_a_catalog_that_does_not_answer(tmp_path: Path, emptydb: Database) -> None:
    nowhere = "host=127.0.0.1 port=1 dbname=x password=secret connect_timeout=2"
    with pytest.raises(PostbusError, match="catalog of Iceberg tables in Postgres cannot be opened") as e:
        Lake(tmp_path, "iceberg", nowhere).open().exists()
    assert "secret" not in str(e.value)
    with pytest.raises(BadArgument, match="option dsn is not a connection string"):
        Lake(tmp_path, "iceberg", "colour=red").open().exists()
    emptydb.connect().execute("create role nobody login")
    with pytest.raises(PostbusError, match="right to create the schema postbus_lake"):
        Lake(tmp_path, "iceberg", f"{emptydb.dsn} user=nobody").open().exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PostbusError, match=r"cannot use .*/file/events"):
        open_table(str(tmp_path / "file"), "events").create(SCHEMA, writer="me")


FULL = """
import resource, signal, sys
import pyarrow as pa
from postbus.errors import PostbusError
from postbus.lake import open_table

lake, format, dsn = sys.argv[1:4]
table = open_table(lake, "events", format=format, dsn=dsn or None)
noise = pa.table({"part": [f"{(i * 7919) % 100_003}" * 9 for i in range(20_000)], "n": range(20_000)})
files = table.write(noise) if sys.argv[4] == "commit" else None
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # or it kills the process
limit = 20_000 if files is None else 100
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    table.append(files or table.write(noise), noise.schema, "q", 1)
except PostbusError as exc:
    print(exc)
    sys.exit(3)
"""


@pytest.mark.parametrize("when", ["write", "commit"])
def test_a_full_disk(lake: Lake, when: str) -> None:
    """Files cannot grow: the same error of the system as a full disk gives, at the same places."""
    table = lake.table(SCHEMA)
    table.append(table.write(pa.table({"part": ["a"], "n": [1]})), SCHEMA, "q", 0)
    done = subprocess.run(
        [sys.executable, "-c", FULL, lake.folder, lake.format, lake.dsn or "", when],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "cannot write" in done.stdout
    assert "no space is left" in done.stdout
    assert "run it again" in done.stdout
    assert rows(lake.open().read(), "n") == rows(lake.elsewhere(), "n") == [1], "nothing half published"
    if when == "write":
        assert len(list((lake.folder / "events").rglob("*.parquet"))) == 1, "nothing left behind"
    again = lake.open()
    assert again.append(again.write(pa.table({"part": ["b"], "n": [2]})), SCHEMA, "q", 1) is True
    assert rows(lake.elsewhere(), "n") == [1, 2]
