"""Worker processes: started, killed, and gone at the end."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType


class Staff:
    """The workers of the shop."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def hire(self, name: str) -> None:
        """Start a worker."""
        command = [sys.executable, "-m", "postbus.demo._workers", self._dsn, name]
        self._processes[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self, name: str) -> None:
        """End a worker as a power cut would."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def __enter__(self) -> Staff:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
