"""``postbus worker`` as a process, in a directory with an application."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import postbus
from tests.worker.waiting import eventually

APP = """
    import asyncio, os, time
    from pathlib import Path
    from postbus import Message, Worker
    from postbus.worker import _signals

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

    stubborn = Worker(maintain=False)

    @stubborn.queue("q")
    async def holds_on(m: Message):
        log(f"begin {m.payload} {m.attempt}")
        if m.payload == "blocks the loop":
            time.sleep(600)
        _signals.MARGIN = 0.5
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

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


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err
