"""``postbus pipeline`` as far as it needs no Spark: listings, upkeep of tables, and what goes wrong early."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from postbus.lake import open_table
from postbus.pipelines import Recorder
from tests.cli.conftest import Cli
from tests.conftest import Database


@pytest.fixture
def cli(db: Database) -> Cli:
    return Cli(db.dsn)


def test_status_and_runs(cli: Cli, db: Database) -> None:
    assert cli("pipeline", "status") == "no pipelines yet: postbus pipeline archive STREAM --lake DIR\n"
    assert cli("pipeline", "runs") == "no runs yet\n"
    c = db.connect()
    c.execute("select postbus.create_stream('orders')")
    c.execute("select postbus.create_group('orders', 'archive.events', '{\"start\": \"earliest\"}')")
    c.execute("select postbus.publish('orders', 'x') from generate_series(1, 3)")
    with Recorder(db.dsn, "events", "archive", {"lake": "/lake"}, ["orders"], "archive.events") as run:
        run.report(rows=7, bytes=2048, until={"orders": 1})
    run = Recorder(db.dsn, "others", "mirror").__enter__()
    run.__exit__(ValueError, ValueError("it broke\nand more"), None)
    heading, first, second = cli("pipeline", "status").splitlines()
    assert heading.split()[:3] == ["PIPELINE", "KIND", "STATE"]
    words = first.split()
    assert words[:3] == ["events", "archive", "done"]
    assert "it broke" in second
    assert "and more" not in second
    (events, others) = cli.json("pipeline", "status")
    assert (events["pipeline"], events["pending"], events["total_rows"], events["until"]) == (
        ("events", 3, 7, {"orders": 1})
    )
    assert events["lag_seconds"] > 0
    assert (others["state"], others["error"]) == ("failed", "it broke\nand more")
    assert [r["run"] for r in cli.json("pipeline", "runs")] == [2, 1]
    (only,) = cli.json("pipeline", "runs", "events")
    assert (only["rows"], only["bytes"], only["options"]) == (7, 2048, {"lake": "/lake"})
    assert len(cli("pipeline", "runs", "--max", "1").splitlines()) == 2
    assert "pipeline 'nope' does not exist" in cli("pipeline", "runs", "nope", code=1)
    assert cli("pipeline", "drop", "events") == "dropped pipeline events\n"
    assert cli.json("groups") == []


def test_compact_and_vacuum(cli: Cli, db: Database, tmp_path: Path) -> None:
    table = open_table(str(tmp_path), "events")
    rows = pa.table({"id": [1, 2, 3]})
    table.create(rows.schema, writer="me")
    for batch in range(3):
        table.append(table.write(rows), rows.schema, "q", batch)
    assert cli("pipeline", "compact", "--lake", str(tmp_path)) == (
        "compacted events: files before 3, files after 1, rows 9\n"
    )
    assert json.loads(cli("pipeline", "vacuum", "--lake", str(tmp_path), "--json"))["files"] == 0
    done = json.loads(cli("pipeline", "vacuum", "--lake", str(tmp_path), "--older-than", "0s", "--json"))
    assert done["files"] == 3
    assert open_table(str(tmp_path), "events").read().num_rows == 9
    assert "no delta table nope" in cli(
        "pipeline", "compact", "--lake", str(tmp_path), "--table", "nope", code=1
    )
    assert "not a time span" in cli(
        "pipeline", "vacuum", "--lake", str(tmp_path), "--older-than", "soon", code=2
    )


def test_errors_before_spark_starts(
    cli: Cli, db: Database, emptydb: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = ("pipeline", "archive", "orders", "--lake", str(tmp_path))

    def told(*args: str, dsn: str = db.dsn) -> str:
        return " ".join(Cli(dsn)(*args, code=1).split())

    assert "no stream 'orders'" in told(*archive)
    db.connect().execute("select postbus.create_stream('orders')")
    unreachable = told(*archive, dsn=make_conninfo(db.dsn, host="127.0.0.1", port=1))
    assert "hint: Check that the server runs" in unreachable
    nobody = told(*archive, dsn=make_conninfo(db.dsn, user="nobody_here", password="secret"))
    assert "hint: Check the user" in nobody
    assert "secret" not in nobody
    assert "no postbus engine" in told(*archive, dsn=emptydb.dsn)
    table = open_table(str(tmp_path), "events")
    table.create(pa.schema({"id": pa.int64()}), writer="somebody")
    assert "is written by 'somebody', not by 'archive.events'" in told(*archive)
    assert "option lakeFormat must be delta or iceberg" in told(*archive, "--format", "csv", "--name", "b")
    assert "bad pipeline name" in told(*archive, "--name", "a b")
    (tmp_path / "file").write_text("")
    below = ("pipeline", "archive", "orders", "--lake", str(tmp_path / "file"), "--name", "c")
    assert "error: " in told(*below)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    missing = told(*archive)
    assert "pyspark is not installed" in missing
    assert "pip install 'postbus[spark]'" in missing
