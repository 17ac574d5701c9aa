"""The demo runs, checks itself, is quick and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from postbus import demo
from postbus.cli import app
from postbus.demo import _check, _lake, _shop
from tests.cli.conftest import Cli, start_process
from tests.conftest import Database


@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(400)
def test_demo_on_an_embedded_server(tmp_path: Path) -> None:
    """With the lake, which is quiet: nothing of Spark's is printed."""
    pytest.importorskip("pyspark")
    (tmp_path / "tmp").mkdir()
    page = tmp_path / "report.html"
    with start_process(None, "demo", "--report", str(page), TMPDIR=str(tmp_path / "tmp")) as process:
        out, err = process.communicate(timeout=380)
    assert process.returncode == 0, out + err
    assert err == ""
    assert "WRONG" not in out
    assert out.count("ok     ") == 10 + _lake.CHECKS
    assert "<svg" in page.read_text(encoding="utf-8")
    # What Spark itself leaves: its log settings, used again by the next session.
    assert [p.name for p in (tmp_path / "tmp").iterdir() if not p.name.startswith("postbus-")] == []


def test_demo_without_spark(db: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_lake, "missing", lambda: ["pyspark"])
    arguments = ["demo", "--report", str(tmp_path / "report.html")]
    done = CliRunner().invoke(app, arguments, env={"POSTBUS_DSN": db.dsn})
    assert done.exit_code == 0, done.output
    assert done.stdout.count("ok     ") == 10
    assert "no lake: pyspark missing, pip install 'postbus[spark]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_demo_on_a_server_makes_and_drops_a_database(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = Cli(db.dsn)
    assert "ok     nothing that was rolled back was seen" in cli("demo", "--no-lake")
    left = db.connect().execute("select count(*) from pg_database where datname ~ '^postbus_demo'").fetchone()
    assert left == (0,)
    assert cli.json("streams") == []


def test_counts_are_exact_and_what_is_wrong_is_noticed(emptydb: Database) -> None:
    seen: list[demo.Progress] = []
    result = demo.run(emptydb.dsn, seen.append)
    assert result.wrong == []
    assert result.rolled_back == _shop.TRANSACTIONS // _shop.ROLLED_BACK_EVERY
    assert result.committed == len(_shop.ORDERS)
    assert result.published == result.changes == _shop.EVENTS
    assert result.dead_letters == result.redriven == 1
    assert result.again >= result.taken_over > 0
    assert seen[-1].billed == seen[-1].analysed == result.published
    assert len({p.stage for p in seen}) >= 4

    conn = emptydb.connect()

    def wrong_after(change: Any) -> list[str]:
        with conn.transaction(force_rollback=True):
            conn.execute(change)
            result.checks.clear()
            _check.check(conn, result)
            return result.wrong

    assert wrong_after("delete from billed where event = (select min(event) from billed)")[0].startswith(
        "billing"
    )
    assert wrong_after("insert into analysed select * from analysed limit 1")[0].startswith("analytics")
    assert wrong_after('update billed set "order" = 5 where "order" = 1') == [
        "nothing that was rolled back was seen"
    ]
    assert wrong_after("update mirror set status = 'lost' where id = 1") == [
        "the mirror made from the changes equals the table"
    ]
    swapped = "update mailed set seq = -seq where customer = 'customer-1'"
    assert wrong_after(swapped) == ["every payment was mailed once, in the order of each customer"]
    swapped = "update analysed set seq = -seq where customer = 'customer-1'"
    assert wrong_after(swapped) == ["billing and analytics kept the order of each customer"]
