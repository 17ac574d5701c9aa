"""A stream moves to another cluster, where transaction ids start again: dump, restore, go on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from postbus.embedded import Server, find_binaries
from postbus.engine import install
from tests.conftest import SERVER_SETTINGS, fast_directory
from tests.stress.sessions import (
    Connection,
    ack,
    alter,
    consume,
    group,
    maintain,
    publish,
    stream,
    take,
    value,
)

KEYS = [f"k{i}" for i in range(12)]
GROUPS = {"total": "stream", "keyed": "key", "free": "none"}


def tool(name: str) -> Path:
    path = find_binaries().bindir / name
    if not path.exists():
        pytest.skip(f"there is no {name} beside this PostgreSQL")
    return path


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[Server, Server]]:
    tool("pg_dump"), tool("psql")
    with (
        Server.temporary(settings=SERVER_SETTINGS, inside=fast_directory()) as high,
        Server.temporary(settings=SERVER_SETTINGS, inside=fast_directory()) as low,
    ):
        with psycopg.connect(high.dsn, autocommit=True) as c:
            c.execute(
                "do $$ begin for i in 1 .. 20000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
        yield high, low


def new_database(server: Server, name: str) -> str:
    with psycopg.connect(server.dsn, autocommit=True) as c:
        c.execute(f"create database {name} template template0".encode())
    return server.dsn_for(name)


def copy(source: str, target: str) -> None:
    """What everybody does: pg_dump | psql. Roles belong to the cluster and are made by hand."""
    with psycopg.connect(source) as a, psycopg.connect(target, autocommit=True) as b:
        for (role,) in a.execute("select rolname from pg_roles where rolname ~ '^postbus_'").fetchall():
            if not b.execute("select 1 from pg_roles where rolname = %s", [role]).fetchone():
                b.execute(f"create role {role}".encode())
    env = {**os.environ, "PGOPTIONS": "-c client_min_messages=warning"}
    dump = subprocess.run([tool("pg_dump"), "-d", source], capture_output=True, check=False, env=env)
    assert dump.returncode == 0, dump.stderr.decode()
    psql: list[str | Path] = [tool("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", target]
    restore = subprocess.run(psql, input=dump.stdout, capture_output=True, check=False, env=env)
    assert restore.returncode == 0, restore.stderr.decode()


def publish_round(c: Connection, name: str) -> list[str]:
    for key in KEYS:
        publish(c, f"{name} {key}", key=key)
    return [f"{name} {key}" for key in KEYS]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("first", ["publish", "consume", "maintain"])
def test_restore_into_a_cluster_with_lower_xids(
    clusters: tuple[Server, Server], lanes: int, first: str
) -> None:
    high, low = clusters
    name = f"restore_{lanes}_{first}"
    source = new_database(high, name)
    with psycopg.connect(source, autocommit=True) as c, psycopg.connect(source) as producer:
        install(c)
        stream(c, lanes=lanes)
        for g, ordering in GROUPS.items():
            group(c, g, ordering=ordering)
        group(c, "done", ordering="key")
        group(c, "leased", ordering="none", backoff=0)
        read = publish_round(c, "read")
        for g in [*GROUPS, "done", "leased"]:
            assert sorted(take(c, by=g)) == sorted(read)
        publish(producer, "never committed", key=KEYS[0])
        unread = publish_round(c, "unread")
        assert sorted(take(c, by="done")) == sorted(unread)
        # One page out on a lease, one message given back, one for later.
        held = consume(c, 3, "10 milliseconds", by="leased")
        c.execute("select postbus.nack(%s::text, '0 seconds')", [held[0][1]])
        c.execute(
            "select postbus.publish('s', 'scheduled', deliver_at => clock_timestamp() + interval '1 second')"
        )
        before = int(value(c, "select pg_current_xact_id()::text::bigint"))
        restored = new_database(low, name)
        copy(source, restored)
    with psycopg.connect(restored, autocommit=True) as c:
        assert int(value(c, "select pg_current_xact_id()::text::bigint")) < before
        check_after_restore(c, unread, first)
        if lanes > 1:
            maintain(c, 3)
            alter(c, lanes=2)
        again = publish_round(c, "third")
        for g in [*GROUPS, "done", "leased"]:
            assert sorted(take(c, by=g)) == sorted(again), g
        # And once more: eras follow one another.
        left = publish_round(c, "fourth")
    last = new_database(low, f"{name}_again")
    copy(restored, last)
    with psycopg.connect(last, autocommit=True) as c:
        left += publish_round(c, "fifth")
        for g in [*GROUPS, "done", "leased"]:
            assert sorted(take(c, by=g)) == sorted(left), g
        maintain(c, 5)


def check_after_restore(c: Connection, unread: list[str], first: str) -> None:
    got: dict[str, list[str]] = {g: [] for g in [*GROUPS, "done", "leased"]}
    if first == "consume":
        for g in got:
            got[g] += take(c, by=g)
    elif first == "maintain":
        maintain(c, 3)
    fresh = publish_round(c, "fresh")
    deadline = time.monotonic() + 10
    while True:
        for g in got:
            got[g] += take(c, by=g)
        if all("scheduled" in rows for rows in got.values()):
            break
        assert time.monotonic() < deadline, f"no scheduled event in {got}"
    expected = sorted([*unread, *fresh, "scheduled"])
    for g in [*GROUPS, "leased"]:
        assert sorted(got[g]) == expected, g
    assert sorted(got["done"]) == sorted([*fresh, "scheduled"])
    for g in ["total", "keyed"]:
        for key in KEYS:
            assert [e for e in got[g] if e.endswith(f" {key}")] == [f"unread {key}", f"fresh {key}"]
    assert "never committed" not in {e for rows in got.values() for e in rows}
    assert ack(c) == 0
