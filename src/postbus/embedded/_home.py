"""The directory of one embedded server, and the locks in it.

::

    <home>/                 0700; also holds the socket
      data/                 the cluster (PGDATA)
      password              of the superuser, for TCP
      server.log
      start.lock            held while somebody looks for, or starts, the server
      holders.lock          shared by every process that uses the server
      supervisor.lock       held by the supervisor: the server runs if and only if it is locked

Locks are flock(2), which the kernel lets go when a process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from postbus.errors import EmbeddedError

_OURS = {"start.lock", "data", "data.new"}
_LOG_LIMIT = 10_000_000
# The shorter of the limits of Linux (107) and macOS (103), less "/.s.PGSQL.65535".
SOCKET_DIR_LIMIT = 103 - 15


@dataclass(frozen=True)
class Postmaster:
    """What ``postmaster.pid`` says about a server that is ready."""

    pid: int
    port: int
    socket_dir: str
    listen: str


class Home:
    """Paths and locks of one embedded server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.log = path / "server.log"
        self.password_file = path / "password"

    def create(self) -> None:
        """Make the directory, private to this user."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {path.name for path in self.path.iterdir()}
            if "PG_VERSION" not in names and (not names or names & _OURS):
                self.path.chmod(0o700)
        except OSError as exc:
            raise EmbeddedError(
                f"cannot use {self.path} as the directory of the embedded server: {exc}",
                remedy="Name another directory, for example with POSTBUS_HOME.",
            ) from exc
        if "PG_VERSION" in names:
            raise EmbeddedError(
                f"{self.path} is a PostgreSQL data directory that Postbus did not make",
                remedy="Start that server yourself and give its DSN, or name another directory.",
            )
        if names and not names & _OURS:
            raise EmbeddedError(
                f"{self.path} holds other things, and the embedded server wants a directory of its own",
                remedy="Name a directory that is empty or does not exist yet.",
            )

    def major(self) -> int | None:
        """The major version that made the data directory; None if there is none yet."""
        try:
            return int((self.data / "PG_VERSION").read_text().split(".")[0])
        except FileNotFoundError:
            return None

    def password(self) -> str:
        """The password of the superuser, made on first use."""
        if not self.password_file.exists():
            fd = os.open(self.password_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_urlsafe(24))
        return self.password_file.read_text()

    def rotate_log(self) -> None:
        """Keep one old log once the log has grown large."""
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))

    def postmaster(self) -> Postmaster | None:
        """Read ``postmaster.pid``; None unless it describes a server that accepts connections."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if len(lines) < 8 or lines[7].strip() != "ready":
            return None
        return Postmaster(int(lines[0]), int(lines[3]), lines[4], lines[5])

    def locked(self, name: str, kind: int = fcntl.LOCK_SH) -> bool:
        """Whether a lock of this kind on the named file would have to wait."""
        fd = self._open(name)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def lock(self, name: str, kind: int, deadline: float) -> int:
        """Take a lock, waiting until the deadline; return the descriptor that holds it."""
        fd = self._open(name)
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                os.close(fd)
                raise EmbeddedError(
                    f"another process is starting or stopping the server in {self.path} and did not finish",
                    remedy=f"See {self.log}; if that process hangs, end it and try again.",
                ) from None
            return fd

    def _open(self, name: str) -> int:
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def default_home(major: int) -> Path:
    """The per-user directory: ``$POSTBUS_HOME``, else ``$XDG_DATA_HOME/postbus``, one per major version."""
    base = os.environ.get("POSTBUS_HOME")
    if not base:
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        base = str(Path(data) / "postbus")
    return Path(base) / f"pg{major}"
