"""What the tests of the embedded server share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import fast_directory

HOLDER = Path(__file__).with_name("holder.py")


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Look again and again until the condition holds; False if it does not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class Holder:
    """Another process that holds a server."""

    def __init__(self, where: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(HOLDER), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the holder ended with {self.process.wait()}"
        facts: dict[str, Any] = json.loads(line)
        self.server_pid: int = facts["pid"]
        self.dsn: str = facts["dsn"]
        self.data_dir = Path(facts["data_dir"])

    def kill(self) -> None:
        """As kill -9 does: no chance to clean up."""
        self.process.kill()
        self._finish()

    def end(self) -> None:
        """Let it stop its server and exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._finish()

    def _finish(self) -> None:
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def hold() -> Iterator[Callable[..., Holder]]:
    """Start holders; those still alive are ended with the test."""
    holders: list[Holder] = []

    def start(where: str | Path, **options: Any) -> Holder:
        holders.append(Holder(str(where), **options))
        return holders[-1]

    yield start
    for holder in holders:
        if holder.process.returncode is None:
            holder.end()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory for one server. Its path is short, unlike tmp_path's, so the socket fits into it."""
    with tempfile.TemporaryDirectory(prefix="pbtest-", dir=fast_directory()) as path:
        yield Path(path).resolve() / "bus"
