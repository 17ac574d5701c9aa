"""The command line and databases that are wrong, missing or of another version; never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from postbus import __version__
from tests.cli.conftest import Cli, run_process
from tests.conftest import Database, run_sql


def test_unreachable_server() -> None:
    code, out, err = run_process(None, "streams", "--dsn", "host=127.0.0.1 port=1 connect_timeout=2")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert "hint: Check that the server runs and that the DSN" in err


def test_malformed_dsn() -> None:
    code, _, err = run_process("this is none", "status")
    assert code == 1
    assert "hint: A DSN reads postgresql://" in err


def test_unknown_database_and_role(server_dsn: str) -> None:
    code, _, err = run_process(make_conninfo(server_dsn, dbname="no_such_db"), "streams")
    assert (code, "database name" in err) == (1, True)
    code, _, err = run_process(make_conninfo(server_dsn, user="no_such_role"), "streams")
    assert (code, "user and the password" in err) == (1, True)


def test_no_engine(emptydb: Database) -> None:
    for command in (["streams"], ["status"], ["publish", "s", "x"], ["upgrade"], ["uninstall", "--force"]):
        assert "there is no postbus engine in this database" in Cli(emptydb.dsn)(*command, code=1)
    code, _, err = run_process(emptydb.dsn, "maintain")
    assert code == 1
    assert "hint: Install it: postbus install." in err


def test_engine_newer_than_the_client(cli: Cli, db: Database) -> None:
    db.connect().execute("update postbus.meta set version = '999.0.0'")
    for command in (["install"], ["upgrade"], ["streams"], ["status"], ["publish", "s", "x"]):
        complaint = cli(*command, code=1)
        assert "version 999.0.0" in complaint
        assert "pip install --upgrade postbus" in complaint


def test_engine_older_than_the_client(cli: Cli, db: Database) -> None:
    db.connect().execute("update postbus.meta set version = '0.0.1'")
    assert "postbus upgrade" in cli("streams", code=1)
    assert f"upgraded postbus from 0.0.1 to {__version__}" in cli("upgrade")
    cli("streams")


def test_role_without_rights(db: Database, server_dsn: str) -> None:
    role = f"stranger_to_{db.name}"
    run_sql(server_dsn, "create role {} login", role)
    try:
        complaint = Cli(make_conninfo(db.dsn, user=role))("streams", code=1)
        assert "permission denied" in complaint
        assert "hint: This role may not do that" in complaint
    finally:
        run_sql(server_dsn, "drop role {}", role)


def test_reader_may_look(db: Database, server_dsn: str) -> None:
    role = f"reader_of_{db.name}"
    run_sql(server_dsn, "create role {} login in role postbus_reader", role)
    try:
        reader = Cli(make_conninfo(db.dsn, user=role))
        assert reader.json("streams") == reader.json("groups") == []
        assert reader.json("status")["warnings"] == []
        assert "permission denied" in reader("streams", "create", "s", code=1)
    finally:
        run_sql(server_dsn, "drop role {}", role)


def test_install_and_uninstall(emptydb: Database) -> None:
    cli = Cli(emptydb.dsn)
    assert f"installed postbus {__version__}" in cli("install")
    assert "already installed" in cli("install")
    assert "was there already" in cli("upgrade")
    assert "--force" in cli("uninstall", code=2)
    cli("streams")
    cli("uninstall", "--force")
    assert "no postbus engine" in cli("streams", code=1)


def test_sql_prints_one_file_for_psql(emptydb: Database) -> None:
    text = Cli("")("sql")
    psql = shutil.which("psql")
    if psql:
        command = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", emptydb.dsn, "-f", "-"]
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)
    else:
        emptydb.connect().execute(text.encode())
    assert json.loads(Cli(emptydb.dsn)("streams", "--json")) == []


def test_version_needs_no_database() -> None:
    code, out, err = run_process("host=/nowhere", "version")
    assert (code, out.strip(), err) == (0, __version__, "")
    assert Cli("")("--version").strip() == __version__


def test_tail_ends_after_max(cli: Cli) -> None:
    cli("streams", "create", "s")
    cli("publish", "s", "--lines", input="a\nb\nc\n")
    assert cli("tail", "s", "--from", "earliest", "--max", "2") == "1 default a\n2 default b\n"
    assert cli.json("groups") == []
    assert "does not exist" in cli("tail", "nowhere", code=1)


def test_colours_only_on_a_terminal(cli: Cli) -> None:
    cli("streams", "create", "s")
    script = Path(shutil.which("script") or "")
    if not script.is_file() or sys.platform != "linux":
        pytest.skip("no script(1) to make a terminal")
    command = f"{sys.executable} -m postbus streams"
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        env |= {"POSTBUS_DSN": cli.dsn, "TERM": "xterm-256color", **extra}
        done = subprocess.run(
            [script, "-qec", command, "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
            env=env,
            stdin=subprocess.DEVNULL,
        )
        # Bold is no colour; NO_COLOR lets it stand.
        assert ("\x1b[" in done.stdout) is coloured or "\x1b[3" not in done.stdout
    assert "\x1b" not in run_process(cli.dsn, "streams")[1]


def test_embedded_server_without_a_dsn(tmp_path: Path) -> None:
    home = {"POSTBUS_HOME": str(tmp_path / "home")}
    code, out, err = run_process(None, "install", **home)
    assert (code, out.split()[0]) == (0, "installed")
    assert err.startswith("postbus: no DSN given, using the embedded PostgreSQL")
    assert str(tmp_path / "home") in err
    assert err.count("\n") == 1
    run_process(None, "streams", "create", "kept", **home)
    assert "kept" in run_process(None, "streams", **home)[1]
