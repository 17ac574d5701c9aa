"""Sessions and alerts: examples/alerts, with Spark in this process and the worker in another."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from postbus.testing import url
from tests.conftest import Database
from tests.examples.running import running, until
from tests.spark.conftest import spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark"]
pytest.importorskip("pyspark")
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

BEGIN = dt.datetime.now(dt.UTC).replace(microsecond=0) - dt.timedelta(days=2)


def log_in(conn: psycopg.Connection[Any], account: str, minutes: int, *, failed: bool = True) -> None:
    """An event of some minutes after the beginning."""
    at = BEGIN + dt.timedelta(minutes=minutes)
    conn.execute("select set_config('postbus.fake_now', %s, false)", [at.isoformat()])
    kind = "login.failed" if failed else "login.ok"
    conn.execute("select postbus.publish('logins', '{}', type => %s, key => %s)", [kind, account])


def sent(conn: psycopg.Connection[Any]) -> Counter[tuple[Any, ...]]:
    """What is in the queue: type, account, first and last minute, log-ins, failed ones."""
    rows = conn.execute("select type, key, payload from postbus.peek('alerts', max => 100)").fetchall()
    found: Counter[tuple[Any, ...]] = Counter()
    for kind, key, text in rows:
        p = json.loads(text)
        assert p["account"] == key
        began, last = ((p[n] / 1000 - BEGIN.timestamp()) / 60 for n in ("began", "last"))
        found[kind, key, began, last, p["logins"], p["failed"]] += 1
    return found


def test_sessions_alerts_and_the_worker(
    server_dsn: str, db: Database, spark: SparkSession, tmp_path: Path
) -> None:
    from examples.alerts.detect import prepare, start

    dsn = url(server_dsn, db.name)
    prepare(dsn)
    events, conn = db.connect(), db.connect()

    def detect() -> None:
        """Until everything is read; a new query each time, as after a crash."""
        query = start(spark, dsn, str(tmp_path / "checkpoint"), once=True)
        query.awaitTermination()

    for minute in (2, 0, 1):
        log_in(events, "ann", minute)
    log_in(events, "ann", 5, failed=False)
    log_in(events, "bob", 0)
    log_in(events, "bob", 10)
    conn.execute("select postbus.publish('logins', '{}', type => 'password.changed', key => 'ann')")
    detect()
    assert sent(conn) == {("account.attacked", "ann", 0, 2, 3, 3): 1}

    def locked() -> list[Any]:
        if conn.execute("select to_regclass('locked')").fetchone() == (None,):
            return []
        return conn.execute("select account, failed, times from locked order by account").fetchall()

    with running("examples.alerts.worker", POSTBUS_DSN=dsn):
        until(lambda: locked() == [("ann", 3, 1)])
    assert not sent(conn)
    # Bob's third is in the session that the run before has seen; Ann's next one is in a session of its own.
    log_in(events, "bob", 20)
    for minute in (120, 121, 122, 123):
        log_in(events, "ann", minute)
    log_in(events, "zoe", 180, failed=False)  # time goes on: the sessions of the others are over
    detect()
    assert sent(conn) == {
        ("account.attacked", "bob", 0, 20, 3, 3): 1,
        ("account.attacked", "ann", 120, 122, 3, 3): 1,
        ("session.ended", "ann", 0, 5, 4, 3): 1,
        ("session.ended", "ann", 120, 123, 4, 4): 1,
        ("session.ended", "bob", 0, 20, 3, 3): 1,
    }
    detect()
    with running("examples.alerts.worker", POSTBUS_DSN=dsn):
        until(lambda: not sent(conn))
    assert locked() == [("ann", 3, 2), ("bob", 3, 1)]
    spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
