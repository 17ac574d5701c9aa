"""``postbus worker`` as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import postbus
from postbus import BadArgument, Bus
from postbus.cli import app
from postbus.cli._worker import load
from tests.conftest import Database
from tests.worker.conftest import empty, eventually, messages

APP = """
    import os, time
    from pathlib import Path
    from postbus import Message, Worker

    worker = Worker(name="from the code", grace=20, maintain=False)
    other = Worker("host=/nowhere", maintain=False)
    not_a_worker = "hello"

    def log(text):
        with Path("log").open("a") as file:
            file.write(text + "\\n")

    @worker.queue("q", concurrency=2, prefetch=8)
    def handle(m: Message):
        log(f"begin {m.payload} {m.attempt}")
        if m.payload == "slow":
            time.sleep(1)
        if m.payload == "hangs":
            time.sleep(600)
        if m.payload == "busy":
            Path("pid").write_text(str(os.getpid()))
        log(f"end {m.payload}")

    @other.queue("q")
    async def elsewhere(m: Message):
        log("other")
"""


class Command:
    """``postbus worker`` in a directory with an application."""

    def __init__(self, directory: Path, dsn: str) -> None:
        self.directory = directory
        self.dsn = dsn
        self.started: list[subprocess.Popen[str]] = []
        (directory / "app.py").write_text(textwrap.dedent(APP))

    def start(self, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "POSTBUS", "PYTHON"))}
        clean |= {
            "POSTBUS_DSN": self.dsn,
            "PYTHONPATH": str(Path(postbus.__file__).parents[1]),
            "COLUMNS": "200",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "postbus", "worker", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env=clean | (env or {}),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        self.started.append(process)
        return process

    def run(self, *args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        out, err = self.start(*args, env=env).communicate(timeout=60)
        assert "Traceback" not in err, err
        assert out == ""
        return self.started[-1].returncode, err

    def log(self) -> list[str]:
        path = self.directory / "log"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, line: str) -> None:
        eventually(lambda: line in self.log(), line)


@pytest.fixture
def command(tmp_path: Path, db: Database, bus: Bus) -> Iterator[Command]:
    bus.queue("q", create=True, backoff=0)
    made = Command(tmp_path, db.dsn)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains(command: Command, bus: Bus, number: signal.Signals) -> None:
    process = command.start("app:worker")
    bus.queue("q").send_batch(["slow", "slow", "rest", "rest"])
    command.until("begin slow 1")
    eventually(lambda: command.log().count("begin slow 1") == 2, "two at a time")
    process.send_signal(number)
    code, err = ended(process)
    assert code == 0, err
    assert f"{number.name}: ending within 20 seconds" in err
    assert command.log().count("end slow") == 2, "what was begun is finished"
    assert messages(bus, "q") == [('"rest"', "ready", 0)] * 2, "the rest is given back"
    assert "Traceback" not in err


def test_the_second_signal_leaves_at_once(command: Command, bus: Bus) -> None:
    process = command.start("app")
    bus.queue("q").send("hangs")
    command.until("begin hangs 1")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "SIGTERM: ending" not in process.stderr.readline():
        pass
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 2
    assert "second signal, leaving at once" in err
    assert messages(bus, "q") == [('"hangs"', "in_flight", 1)], "it comes again when its lease ends"


def test_a_thread_that_never_ends(command: Command, bus: Bus) -> None:
    process = command.start("app:worker", "--grace", "0.5")
    bus.queue("q").send("hangs")
    command.until("begin hangs 1")
    began = time.monotonic()
    process.terminate()
    code, err = ended(process)
    assert code == 0
    assert time.monotonic() - began < 5, "does not keep the process"
    assert "1 handlers did not end in time" in err
    assert messages(bus, "q") == [('"hangs"', "ready", 1)]


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


def test_processes_end_with_the_worker(command: Command, bus: Bus) -> None:
    (command.directory / "app.py").write_text(
        textwrap.dedent(APP)
        + textwrap.dedent("""
        def child(m: Message):
            log(f"child {os.getpid()}")
            time.sleep(600)

        bus = Worker(maintain=False)
        bus.queue("q", process=True)(child)
        """)
    )
    for signals in (1, 2):
        process = command.start("app:bus", "--grace", "0.2" if signals == 1 else "60")
        bus.queue("q").send("x")
        eventually(lambda: len([x for x in command.log() if x.startswith("child")]) >= signals, "at work")  # noqa: B023
        pid = int(command.log()[-1].split()[1])
        process.terminate()
        if signals == 2:
            assert process.stderr is not None
            while "ending" not in process.stderr.readline():
                pass
            process.terminate()
        ended(process)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), "no process is left")  # noqa: B023
        bus.queue("q").purge()
