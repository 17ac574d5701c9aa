"""``postbus worker``: its options, and what it says when something is wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import postbus
from postbus import BadArgument, Bus
from postbus.cli import app
from postbus.cli._worker import load
from tests.worker.command import APP, Command, ended
from tests.worker.conftest import empty
from tests.worker.waiting import eventually


def test_options(command: Command, bus: Bus) -> None:
    process = command.start(
        "app:other", "--dsn", command.dsn, "--name", "from the shell", "--health", "0", "--concurrency", "3",
        env={"POSTBUS_DSN": "host=/nowhere"},
    )  # fmt: skip
    bus.queue("q").send("x")
    command.until("other")
    eventually(empty(bus, "q"), "acked")
    process.terminate()
    code, err = ended(process)
    assert code == 0
    assert "worker from the shell: q" in err


def test_dsn_of_the_environment_is_for_workers_that_have_none(command: Command, bus: Bus) -> None:
    process = command.start("app:other", "--log-level", "warning")
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "no connection, trying again" in line
    assert "/nowhere" in line
    process.terminate()
    assert ended(process)[0] == 0, "also while it waits for the database"


def test_health(command: Command, bus: Bus, unused_port: Callable[[], int]) -> None:
    port = unused_port()
    command.start("app:worker", "--health", f"127.0.0.1:{port}")

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    eventually(healthy, "it answers")


@pytest.fixture
def unused_port() -> Callable[[], int]:
    import socket

    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    return find


def test_log_level(command: Command, bus: Bus) -> None:
    process = command.start("app:worker", "--log-level", "error")
    bus.queue("q").send("x")
    command.until("end x")
    process.terminate()
    assert ended(process) == (0, "")


BROKEN = {
    "broken": "import nothing_like_that\n",
    "fails": "x = 1\n\nraise ValueError('at import')\n",
    "typo": "def x(:\n",
    "empty": "",
    "package/__init__.py": "",
    "package/jobs.py": "from postbus import Worker\nlater = Worker()\n",
}


@pytest.mark.parametrize(
    ("target", "error", "hint"),
    [
        ("nowhere:worker", "there is no module 'nowhere'", "the directory that holds"),
        ("package.nowhere:worker", "there is no module 'package.nowhere'", "the directory that holds"),
        ("nowhere.jobs:worker", "there is no module 'nowhere'", "the directory that holds"),
        ("broken:worker", "module 'broken' needs 'nothing_like_that'", "Install it"),
        ("fails", "ValueError: at import", "python -c 'import fails'"),
        ("typo", "SyntaxError", "python -c 'import typo'"),
        ("empty", "module 'empty' has no 'worker'", "worker = Worker()"),
        ("app:nothing", "module 'app' has no 'nothing'", "app:worker, app:other"),
        ("app:not_a_worker", "is a str, not a Worker", "app:worker, app:other"),
        ("app.py:worker", "is a file", "postbus worker app:worker"),
        ("./package/jobs.py:later", "is a file", "postbus worker package.jobs:later"),
        ("not a module", "is not the name of a module", "MODULE:WORKER"),
        ("package.jobs:later", "the worker has no handlers", "Decorate a function"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, error: str, hint: str
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(BadArgument) as caught:
        asyncio.run(load(target).run())
    assert error in caught.value.message
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def lay_out(directory: Path) -> None:
    (directory / "app.py").write_text(textwrap.dedent(APP))
    for name, text in BROKEN.items():
        path = directory / (name if name.endswith(".py") else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_errors_are_two_lines(command: Command) -> None:
    lay_out(command.directory)
    code, err = command.run("fails:worker")
    assert code == 1
    first, second = err.strip().splitlines()
    assert first.startswith("error: module 'fails' cannot be imported: ValueError: at import")
    assert f"{command.directory / 'fails.py'}, line 3" in first, "the line of the application"
    assert second.startswith("hint: ")


def test_unknown_queue(command: Command, bus: Bus) -> None:
    bus.fetch("select postbus.drop_queue('q')", ())
    code, err = command.run("app:worker")
    assert code == 1
    assert "error: queue 'q' does not exist" in err
    assert "hint: Create it" in err


@pytest.mark.parametrize(
    "args",
    [("app", "--grace", "-1"), ("app", "--concurrency", "0"), ("app", "--log-level", "loud"), ()],
)
def test_wrong_usage(args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["worker", *args])
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_worker_main_of_a_script(command: Command, bus: Bus) -> None:
    """`Worker.main` behaves the same."""
    script = command.directory / "script.py"
    script.write_text(textwrap.dedent(APP) + '\nif __name__ == "__main__":\n    worker.main()\n')
    env = {**os.environ, "POSTBUS_DSN": command.dsn, "PYTHONPATH": str(Path(postbus.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=command.directory, env=env, stderr=subprocess.PIPE, text=True
    )
    command.started.append(process)
    bus.queue("q").send("x")
    command.until("end x")
    process.terminate()
    assert ended(process)[0] == 0
    bus.fetch("select postbus.drop_queue('q')", ())
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=command.directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: queue 'q' does not exist"
    assert "Traceback" not in done.stderr
