"""Status and help."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command

from postbus import __version__
from postbus.cli import app
from tests.cli.conftest import Cli
from tests.conftest import Database


def test_status_of_an_empty_bus(cli: Cli) -> None:
    out = cli("status")
    assert f"postbus {__version__}" in out
    assert "no streams yet" in out
    assert "nothing to worry about" in out


def test_status_shows_streams_groups_and_warnings_with_remedies(cli: Cli, db: Database) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g", "--max-attempts", "1")
    cli("publish", "s", "--lines", input="a\nb\n")
    cli("consume", "s", "g", "--max", "1", "--nack")
    cli("consume", "s", "g", "--max", "1", "--no-ack")
    cli("publish", "s", "c")
    cli("pause", "s", "--group", "g")
    found = cli.json("status")
    assert list(found) == [
        "version", "client_version", "server_version", "database", "streams", "groups", "queues", "schedules",
        "warnings",
    ]  # fmt: skip
    [group] = found["groups"]
    assert (group["in_flight"], group["dead_letters"]) == (1, 1)
    assert {w["remedy"] for w in found["warnings"]} == {"postbus dlq list s", "postbus resume s --group g"}
    out = cli("status")
    assert "warning: stream s has 1 dead letters" in out
    assert "remedy: postbus dlq list s" in out


def test_status_warns_of_lost_groups_and_missing_upkeep(cli: Cli, db: Database) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g")
    cli("publish", "s", "x")
    conn = db.connect()
    conn.execute("select postbus.tick('s')")
    conn.execute("update postbus.tick set at = at - interval '1 hour'")
    conn.execute("update postbus.stream set floor_tick = floor_tick + 1")
    conn.execute("select postbus._stamp(id) from postbus.stream")
    problems = {w["about"]: w for w in cli.json("status")["warnings"]}
    assert problems["group g of stream s"]["remedy"] == "postbus seek s g earliest"
    assert problems["upkeep"]["problem"].startswith("has not been run for 1 h")
    cli("seek", "s", "g", "earliest")
    cli("maintain")
    assert cli.json("status")["warnings"] == []


def test_status_warns_of_prepared_transactions(
    cli: Cli, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from postbus.cli import _status

    monkeypatch.setattr(_status, "_OLD", "0 seconds")
    conn = db.connect()
    busy = db.connect(autocommit=False, application_name="sleeper")
    busy.execute("select 1")
    conn.execute("create table t ()")
    conn.execute("begin")
    conn.execute("insert into t default values")
    conn.execute("prepare transaction 'it''s'")
    try:
        problems = {w["about"]: w for w in cli.json("status")["warnings"]}
    finally:
        conn.execute("rollback prepared 'it''s'")
    assert "rollback prepared 'it''s'" in problems["prepared transaction it's"]["remedy"]
    pid = busy.info.backend_pid
    assert "of sleeper" in problems[f"transaction (pid {pid})"]["problem"]


def commands(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [path] + [p for name, sub in below.items() for p in commands(sub, (*path, name))]


@pytest.mark.parametrize("path", commands(get_command(app)), ids=" ".join)
def test_every_help_has_an_example_that_exists(cli: Cli, path: tuple[str, ...]) -> None:
    out = " ".join(cli(*path, "--help").split())
    if path == ("dlq",):
        return
    example = " ".join(("postbus", *path))
    assert (
        f"Example: {example}" in out
        or (path == () and "Example: postbus demo" in out)
        or f"| {example}" in out
    )
