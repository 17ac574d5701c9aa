"""The demo runs, checks itself, is quick and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from postbus import demo
from postbus.demo import _check, _shop
from tests.cli.conftest import Cli, run_process
from tests.conftest import Database


def test_demo_on_an_embedded_server(tmp_path: Path) -> None:
    code, out, err = run_process(None, "demo", TMPDIR=str(tmp_path))
    assert code == 0, out + err
    assert "WRONG" not in out
    assert out.count("ok     ") == 10
    assert list(tmp_path.iterdir()) == []


def test_demo_on_a_server_makes_and_drops_a_database(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = Cli(db.dsn)
    assert "ok     nothing that was rolled back was seen" in cli("demo")
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
