"""Shell completion: the scripts, commands, options, and names from the database."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.conftest import Database

PROGRAM = "import sys; from postbus.cli import main; sys.argv[0] = 'postbus'; main()"


def run(*args: str, dsn: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program under its own name, which completion goes by."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "POSTBUS", "_POSTBUS"))}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean | ({"POSTBUS_DSN": dsn} if dsn else {}) | env,
    )


def complete(dsn: str, line: str) -> list[str]:
    """What bash is offered at the end of a line."""
    words = line.split(" ")
    done = run(dsn=dsn, _POSTBUS_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


@pytest.fixture
def named(cli: Cli) -> Cli:
    for queue in ("emails", "errands"):
        cli("queues", "create", queue)
    cli("streams", "create", "events")
    cli("groups", "create", "events", "billing")
    cli("groups", "create", "events", "tail:1")
    cli("schedule", "daily", "0 9 * * *", "emails", "x")
    return cli


# One process each, so the lines are few; _completer is asked about the others below.
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("postbus send ", ["emails", "errands"]),
        ("postbus queues drop er", ["errands"]),
        ("postbus consume events ", ["billing"]),
        ("postbus pause events --group ", ["billing"]),
        ("postbus resume e", ["emails", "errands", "events"]),
        ("postbus queues create e", []),
        ("postbus seek events billing ", ["earliest", "latest"]),
        ("postbus do", ["doctor"]),
    ],
)
def test_lines(named: Cli, line: str, offered: list[str]) -> None:
    assert complete(named.dsn, line) == offered


def test_dsn_on_the_line(named: Cli) -> None:
    dsn = named.dsn.replace(" ", "\\ ")
    done = run(
        _POSTBUS_COMPLETE="complete_bash", COMP_WORDS=f"postbus --dsn {dsn} unschedule ", COMP_CWORD="4"
    )
    assert done.stdout.split() == ["daily"]


def test_silent_and_quick_where_there_is_no_database(db: Database) -> None:
    began = time.monotonic()
    assert complete("", "postbus send ") == []
    assert complete("host=/nowhere", "postbus send ") == []
    db.connect().execute("drop schema postbus cascade")
    assert complete(db.dsn, "postbus send ") == []
    assert time.monotonic() - began < 20


def test_every_name_that_a_command_takes() -> None:
    """By path and parameter; what is new or free has no completion."""
    from typer.main import get_command

    from postbus.cli import app
    from postbus.cli._completion import _completer, _parameters

    found = {(*path, p.name): _completer((*path, p.name)) for path, p in _parameters(get_command(app), ())}
    names = {path for path in found if path[-1] in {"queue", "stream", "group", "name", "target", "to"}}
    without = {path for path in names if found[path] is None}
    assert without == {
        ("queues", "create", "name"), ("streams", "create", "name"), ("groups", "create", "group"),
        ("schedule", "name"),
    }  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str, tmp_path: Path) -> None:
    given = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    done = run("--show-completion", shell, **given)
    assert done.returncode == 0
    assert "_POSTBUS_COMPLETE" in done.stdout
    done = run("--install-completion", shell, **given)
    assert done.returncode == 0, done.stderr
    assert f"{shell} completion installed in {tmp_path}" in done.stdout.replace("\n", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_names_for_other_shells(named: Cli, shell: str) -> None:
    done = run(
        dsn=named.dsn,
        _POSTBUS_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS="postbus send e",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "emails" in done.stdout
    assert "errands" in done.stdout


def test_in_bash(named: Cli, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = tmp_path / "postbus"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(postbus --show-completion bash)"; COMP_WORDS=(postbus receive em); COMP_CWORD=2;'
        ' _postbus_completion postbus; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ
        | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "POSTBUS_DSN": named.dsn,
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        },
    )
    assert done.stdout.split() == ["emails"]
