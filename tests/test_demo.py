"""The demo runs, checks itself, is quick and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from postbus import demo
from tests.cli.conftest import Cli, run_process
from tests.conftest import Database


def test_demo_on_an_embedded_server(tmp_path: Path) -> None:
    code, out, err = run_process(None, "demo", TMPDIR=str(tmp_path))
    assert code == 0, out + err
    assert "WRONG" not in out
    assert out.count("ok     ") == 11
    assert list(tmp_path.iterdir()) == []


def test_demo_on_a_server_makes_and_drops_a_database(db: Database) -> None:
    cli = Cli(db.dsn)
    assert "ok     nothing rolled back was seen" in cli("demo")
    left = db.connect().execute("select count(*) from pg_database where datname ~ '^postbus_demo'").fetchone()
    assert left == (0,)
    assert cli.json("streams") == []


def test_counts_are_exact(emptydb: Database) -> None:
    said: list[str] = []
    with psycopg.connect(emptydb.dsn, autocommit=True) as conn:
        result = demo.run(conn, said.append)
    assert result.wrong == []
    assert result.rolled_back == demo.TRANSACTIONS // 5
    assert result.published == result.delivered["billing"] == result.delivered["analytics"]
    assert result.changes == result.delivered["mirror"]
    assert result.seconds < 30  # under one on an idle machine
    assert len(said) == 6


def test_demo_notices_what_is_wrong(emptydb: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = demo._acked
    monkeypatch.setattr(demo, "_acked", lambda conn, batch: whole(conn, batch)[1:])
    with psycopg.connect(emptydb.dsn, autocommit=True) as conn:
        result = demo.run(conn)
    assert "billing finished every event exactly once" in result.wrong
