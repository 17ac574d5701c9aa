"""Databases for tests: made, dropped, and named for whoever connects."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from postbus.testing import fresh, url


@pytest.mark.parametrize(
    "dsn",
    [
        "host=/tmp/a-socket port=5433 user=postgres",
        "host=localhost",
        "host=::1 port=5432 user=me password=p@ss:w/rd?",
        "postgresql://me:p%40ss@example.com:5433/postgres?sslmode=require",
        "host=a,b port=1,2 user=me",
        "",
    ],
)
def test_a_dsn_as_url(dsn: str) -> None:
    made = url(dsn, "a database")
    assert made.startswith("postgresql://")
    assert conninfo_to_dict(made) == {**conninfo_to_dict(dsn), "dbname": "a database"}


def test_databases_go_although_somebody_is_connected(server_dsn: str, template: str) -> None:
    with fresh(server_dsn, template) as name:
        conn = psycopg.connect(url(server_dsn, name))
    with pytest.raises(psycopg.OperationalError):
        conn.execute("select 1")
    conn.close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url(server_dsn, name))
