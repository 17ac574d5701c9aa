"""The command line in this process, or as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from postbus.cli import app
from tests.conftest import Database


@dataclass
class Cli:
    """Runs commands against one database."""

    dsn: str

    def __call__(self, *args: str, code: int = 0, input: str | bytes | None = None) -> str:
        """Run a command in this process; return what it printed, or what it complained about."""
        result = CliRunner().invoke(app, list(args), input=input, env={"POSTBUS_DSN": self.dsn})
        assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
        assert "Traceback" not in result.output
        return result.stderr if code else result.stdout

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "--json"))

    def lines(self, *args: str) -> list[Any]:
        return [json.loads(line) for line in self(*args, "--json").splitlines()]


@pytest.fixture
def cli(db: Database) -> Cli:
    return Cli(db.dsn)


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes with pipes; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(dsn: str | None, *args: str) -> subprocess.Popen[str]:
        started.append(start_process(dsn, *args))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        with process:
            pass


def start_process(dsn: str | None, *args: str, **env: str) -> subprocess.Popen[str]:
    """Start ``python -m postbus`` with pipes."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "POSTBUS"))}
    return subprocess.Popen(
        [sys.executable, "-m", "postbus", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that started the tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        env=clean | ({"POSTBUS_DSN": dsn} if dsn else {}) | env,
    )


def run_process(dsn: str | None, *args: str, **env: str) -> tuple[int, str, str]:
    """Run ``python -m postbus`` to its end; return exit code, stdout and stderr."""
    with start_process(dsn, *args, **env) as process:
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, out, err
