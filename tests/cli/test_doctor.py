"""``postbus doctor``: each finding appears when there is reason for it; exit codes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postbus import __version__
from postbus.cli import _checks, _probes
from postbus.cli._checks import Finding
from tests.cli.conftest import Cli
from tests.conftest import Database, run_sql


def findings(dsn: str, check: str) -> list[Finding]:
    """What one check says, on a connection of its own."""
    with closing(psycopg.connect(dsn, autocommit=True)) as conn:
        return [finding for finding in _probes.run(conn) if finding.check == check]


def levels(found: list[Finding]) -> list[str]:
    return [finding.level for finding in found]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of these tests have fsync off, on purpose."""
    monkeypatch.delitem(_probes.CHECKS, "settings")


@pytest.mark.usefixtures("healthy")
def test_nothing_wrong(cli: Cli) -> None:
    out = cli("doctor", "--strict")
    assert out.splitlines()[-1] == "8 ok, 0 warnings, 0 failures"
    found = cli.json("doctor")
    assert [f["check"] for f in found] == [
        "server", "connections", "sessions", "listen", "clock", "engine", "tables", "bus",
    ]  # fmt: skip
    assert {f["level"] for f in found} == {"ok"}
    assert {f["remedy"] for f in found} == {None}


@pytest.mark.usefixtures("healthy")
def test_exit_codes(cli: Cli, db: Database) -> None:
    cli("queues", "create", "emails")
    cli("pause", "emails")
    out = cli("doctor")
    assert "warn  bus         queue emails is paused\n      remedy: postbus resume emails\n" in out
    assert "7 ok, 1 warnings, 0 failures" in out
    cli("doctor", "--strict", code=1)
    db.connect().execute("update postbus.meta set version = '99.0.0'")
    cli("doctor", code=2)
    cli("doctor", "--strict", code=2)


def test_a_server_that_cannot_be_reached_is_a_finding() -> None:
    from typer.testing import CliRunner

    from postbus.cli import app

    result = CliRunner().invoke(app, ["doctor", "--json", "--dsn", "host=/nowhere connect_timeout=2"])
    assert result.exit_code == 2
    [found] = json.loads(result.stdout)
    assert (found["check"], found["level"]) == ("connect", "fail")
    assert "DSN" in found["remedy"]


def test_without_an_engine_the_rest_is_left_out(emptydb: Database) -> None:
    with closing(psycopg.connect(emptydb.dsn, autocommit=True)) as conn:
        found = list(_probes.run(conn))
    assert found[-1].check == "engine"
    assert (found[-1].level, found[-1].remedy) == ("fail", "Install it: postbus install.")


@pytest.mark.parametrize(("version", "level"), [("0.0.1", "fail"), ("99.0.0", "fail"), (__version__, "ok")])
def test_engine_and_package(db: Database, version: str, level: str) -> None:
    db.connect().execute("update postbus.meta set version = %s", (version,))
    [found] = findings(db.dsn, "engine")
    assert found.level == level


@pytest.mark.parametrize(
    ("setting", "level", "words"),
    [
        ("synchronous_commit=off", "warn", "synchronous_commit is off"),
        ("default_transaction_isolation=serializable", "fail", "SERIALIZABLE"),
        ("statement_timeout=5s", "warn", "statement_timeout is 5000 ms"),
        ("idle_session_timeout=1h", "warn", "idle_session_timeout"),
        ("idle_in_transaction_session_timeout=5s", "warn", "idle_in_transaction_session_timeout"),
    ],
)
def test_settings(db: Database, setting: str, level: str, words: str) -> None:
    found = findings(make_conninfo(db.dsn, options=f"-c {setting}"), "settings")
    assert [f.level for f in found if words in f.message] == [level]
    assert all(f.remedy for f in found)
    assert not any(words in f.message for f in findings(db.dsn, "settings"))


def test_unsafe_servers(db: Database) -> None:
    [(fsync,)] = db.connect().execute("show fsync").fetchall()
    found = [f for f in findings(db.dsn, "settings") if f.message.startswith("fsync is off")]
    assert levels(found) == (["fail"] if fsync == "off" else [])


def test_read_only_databases(db: Database) -> None:
    found = findings(make_conninfo(db.dsn, options="-c default_transaction_read_only=on"), "server")
    assert levels(found) == ["ok", "fail"]


def test_room_for_connections(db: Database) -> None:
    [found] = findings(db.dsn, "connections")
    assert found.level == "ok"
    used, most = (int(word) for word in found.message.split() if word.isdigit())
    for _ in range(int(0.82 * most) - used):
        db.connect()
    [found] = findings(db.dsn, "connections")
    assert found.level == "warn"


def test_open_transactions(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = db.connect(autocommit=False, application_name="sleeper")
    sleeper.execute("select 1")
    assert levels(findings(db.dsn, "sessions")) == ["ok"]
    monkeypatch.setattr(_checks, "_IDLE", "0 seconds")
    [found] = [f for f in findings(db.dsn, "sessions") if "sleeper" in f.message]
    assert found.level == "warn"
    assert "(idle in transaction)" in found.message
    assert found.remedy == f"end it, or: select pg_terminate_backend({sleeper.info.backend_pid})"


def test_dead_rows_and_autovacuum(db: Database) -> None:
    with closing(psycopg.connect(db.dsn, autocommit=True)) as conn:
        conn.execute("alter table postbus.tally set (autovacuum_enabled = false)")
        conn.execute("insert into postbus.tally select 1, 'x', 1 from generate_series(1, 100001)")
        conn.execute("delete from postbus.tally")
    # A session reports such figures at its end, and somebody has to take note.
    until = time.monotonic() + 20
    while len(found := findings(db.dsn, "tables")) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    off, dead = found
    assert off.message == "autovacuum is off for postbus.tally"
    assert dead.message == "postbus.tally has 100001 dead rows beside 0 live ones; last vacuumed: never"
    assert levels(found) == ["warn", "warn"]


def test_clocks(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(findings(db.dsn, "clock")) == ["ok"]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    [found] = findings(db.dsn, "clock")
    assert found.level == "warn"
    assert "behind this machine's" in found.message
    monkeypatch.undo()
    moved = make_conninfo(db.dsn, options="-c postbus.fake_now=2030-01-01")
    assert levels(findings(moved, "clock")) == ["ok", "fail"]


@pytest.mark.parametrize("right", [False, True])
def test_a_role_with_few_rights_learns_what_it_can(db: Database, server_dsn: str, right: bool) -> None:
    role = f"patient_of_{db.name}"
    run_sql(server_dsn, "create role {} login", role)
    try:
        if right:
            run_sql(server_dsn, "grant postbus_reader to {}", role)
        found = {f.check: f for f in _run_as(db, role)}
    finally:
        db.close()
        run_sql(server_dsn, "drop role {}", role)
    assert found["server"].level == found["listen"].level == "ok"
    if right:
        assert found["bus"].level == "ok"
    else:
        assert found["engine"].level == "warn"
        assert found["engine"].remedy == "use the role that installed Postbus"


def _run_as(db: Database, role: str) -> list[Finding]:
    with closing(psycopg.connect(db.dsn, user=role, autocommit=True)) as conn:
        return list(_probes.run(conn))


def test_listen_through_a_pooler_that_swallows_notifications(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_probes, "_LISTEN_SECONDS", 0.3)
    assert levels(findings(db.dsn, "listen")) == ["ok"]
    with _deaf(db.dsn) as dsn:
        [found] = findings(dsn, "listen")
    assert found.level == "warn"
    assert "workers only poll" in found.message


@contextmanager
def _deaf(dsn: str) -> Iterator[str]:
    """Leads to the same server, but for NotificationResponse messages: as a transaction pooler."""
    given = conninfo_to_dict(dsn)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        host, port = str(given["host"]), str(given["port"])
        unix = host.startswith("/")
        with client, socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as server:
            server.connect(f"{host}/.s.PGSQL.{port}" if unix else (host, int(port)))
            there = threading.Thread(target=_copy, args=(client, server))
            there.start()
            with server.makefile("rb") as answers:
                while head := answers.read(5):
                    body = answers.read(int.from_bytes(head[1:]) - 4)
                    if head[:1] != b"A":
                        client.sendall(head + body)
            there.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                serving.append(threading.Thread(target=serve, args=(client,)))
                serving[-1].start()

    serving = [threading.Thread(target=accept, daemon=True)]
    serving[0].start()
    port = listener.getsockname()[1]
    try:
        yield make_conninfo(
            dsn,
            host="127.0.0.1",
            port=port,
            sslmode="disable",
            gssencmode="disable",
            password=given.get("password"),
        )
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in serving:
            thread.join(20)


def _copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
