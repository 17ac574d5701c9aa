"""A PgBouncer in transaction mode before the server of the tests.

Where there is none it is installed, if this is root on a machine with apt-get. Each test process has its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postbus.embedded._identity import Identity, choose
from postbus.errors import EmbeddedError

# Fewer sessions than a test has clients: they have to share.
POOL_SIZE = 2
USER = "pooled"
INSTALL_SECONDS = 90.0  # less than the time limit of the test that asks first


class NoPooler(Exception):  # noqa: N818 - a reason to skip
    """There is no PgBouncer here; the text says what to do about it."""


@dataclass(frozen=True)
class Pooler:
    """A running PgBouncer. `pid` is for tests that stop it."""

    port: int
    pid: int

    def dsn(self, database: str) -> str:
        """Through the pooler to a database of the server."""
        return make_conninfo(host="127.0.0.1", port=self.port, dbname=database, user=USER, sslmode="disable")

    def ask(self, command: str) -> list[dict[str, Any]]:
        """A command of its console, such as ``show pools``."""
        with psycopg.connect(self.dsn("pgbouncer"), autocommit=True) as conn:
            cur = conn.execute(command.encode())
            names = [column.name for column in cur.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cur.fetchall()] if names else []


def find() -> Path | None:
    """The program, if it is installed."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    return Path(found) if found else None


def find_or_install() -> Path:
    """The program, installed now if need be and if that can be done."""
    if found := find():
        return found
    remedy = "install PgBouncer (apt-get install pgbouncer, brew install pgbouncer) or put it on PATH"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise NoPooler(f"no pgbouncer on PATH or in /usr/sbin: {remedy}")
    # One test process installs, the others wait for it.
    with Path(tempfile.gettempdir(), "postbus-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := find():
            return found
        said = _install()
    if found := find():
        return found
    raise NoPooler(f"apt-get could not install pgbouncer ({said}): {remedy}")


def _install() -> str:
    """Try with the package lists there are, then with fresh ones; returns the end of what apt-get said."""
    install = ["install", "-y", "-q", "--no-install-recommends", "pgbouncer"]
    end = time.monotonic() + INSTALL_SECONDS
    said = ""
    for arguments in (install, ["update", "-q"], install):
        try:
            done = subprocess.run(
                ["apt-get", *arguments],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=max(1.0, end - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return f"not done after {INSTALL_SECONDS:.0f} s"
        said = (done.stdout.strip().splitlines() or ["no output"])[-1]
        if find():
            break
    return said


@contextmanager
def pooler(server_dsn: str, **settings: object) -> Iterator[Pooler]:
    """Run a PgBouncer before a server; settings go to its configuration.

    Raises:
        NoPooler: where it is not installed and cannot be, or cannot be run.
    """
    program = find_or_install()
    server = {name: str(value) for name, value in conninfo_to_dict(server_dsn).items()}
    with tempfile.TemporaryDirectory(prefix="postbus-pgbouncer-") as name:
        home = Path(name)
        identity = _identity(program, server, home)
        identity.give(home)
        for attempt in (1, 2, 3):
            process, port = _start(program, identity, server, home, settings)
            try:
                if _answers(process, port, server.get("dbname", "postgres")):
                    yield Pooler(port, process.pid)
                    return
            finally:
                _stop(process)
            # Somebody else may have taken the port between choosing and using it.
            log = (home / "log").read_text(encoding="utf-8", errors="replace")
            if attempt == 3 or "in use" not in log:
                raise RuntimeError(f"pgbouncer did not start:\n{log}")


def _identity(program: Path, server: Mapping[str, str], home: Path) -> Identity:
    """PgBouncer does not run as root either, and has to reach the server's socket."""
    reach = Path(server["host"]) if server.get("host", "").startswith("/") else None
    try:
        return choose(reach or home, reach or home / "nothing yet", program)
    except EmbeddedError as e:
        raise NoPooler(f"{program} can be run by no user that reaches the server: {e.hint}") from e


def _start(
    program: Path,
    identity: Identity,
    server: Mapping[str, str],
    home: Path,
    settings: Mapping[str, object],
) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    target = {key: server[key] for key in ("host", "port", "user", "password") if key in server}
    options = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",  # everybody comes in, as the user of the target
        "admin_users": USER,
        "pool_mode": "transaction",
        "default_pool_size": POOL_SIZE,
        "max_client_conn": 200,
        "server_idle_timeout": 10,
        "log_connections": 0,
        "log_disconnections": 0,
        **settings,
    }
    lines = ["[databases]", "* = " + " ".join(f"{key}={value}" for key, value in target.items())]
    lines += ["[pgbouncer]", *(f"{key} = {value}" for key, value in options.items())]
    ini = home / "pgbouncer.ini"
    ini.write_text("\n".join(lines) + "\n", encoding="utf-8")
    identity.give(ini)
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*identity.prefix, str(program), "-q", str(ini)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
        )
    return process, port


def _answers(process: subprocess.Popen[bytes], port: int, database: str) -> bool:
    dsn = Pooler(port, process.pid).dsn(database)
    end = time.monotonic() + 15
    while process.poll() is None and time.monotonic() < end:
        try:
            psycopg.connect(dsn, connect_timeout=5).close()
        except psycopg.OperationalError:
            time.sleep(0.02)
        else:
            return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
