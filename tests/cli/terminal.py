"""A terminal for programs that want one: a pty, and what is on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

_HOME = "\x1b[H"
_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs ``python -m postbus`` in a terminal of its own."""

    def __init__(self, dsn: str, *args: str, columns: int = 80, lines: int = 24, **env: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._slave = slave
        self.before = termios.tcgetattr(slave)
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("PG", "POSTBUS", "COLUMNS", "LINES"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "postbus", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_own_terminal,  # noqa: PLW1509
            env=clean | {"POSTBUS_DSN": dsn, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | env,
        )
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def screens(self) -> list[str]:
        """Every screen so far, without colours. The last may not be complete."""
        return [_STEERING.sub("", screen) for screen in self.text.split(_HOME)[1:]]

    def wait_for(self, wanted: Callable[[str], Any], seconds: float = 20) -> str:
        """Read until a screen is as wanted; that screen."""
        until = time.monotonic() + seconds
        seen = 0
        while True:
            screens = self.screens()
            for screen in screens[max(0, seen - 1) :]:
                if wanted(screen):
                    return screen
            seen = len(screens)
            assert time.monotonic() < until, f"not on the screen: {screens[-1:]}"
            assert self._read(0.1) or self.process.poll() is None, f"it has ended: {self.text}"

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self, seconds: float = 20) -> int:
        """Wait for the end; the exit code."""
        until = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < until, "it does not end"
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    def restored(self) -> bool:
        """Whether the terminal is as it was: its modes, its cursor, and the screen from before."""
        shown = self.text.rfind("\x1b[?25h") > self.text.rfind("\x1b[?25l")
        left = self.text.rfind("\x1b[?1049l") > self.text.rfind("\x1b[?1049h")
        return shown and left and termios.tcgetattr(self._slave) == self.before

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def _own_terminal() -> None:
    # Ctrl-C reaches those whose controlling terminal it is.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
