"""Start the supervisor with its job, and see how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from postbus.embedded import _supervisor
from postbus.embedded._binaries import Binaries
from postbus.embedded._home import SOCKET_DIR_LIMIT, Home
from postbus.embedded._identity import Identity, choose
from postbus.embedded._staging import stage
from postbus.errors import EmbeddedError

_REMEDIES = {
    "Address already in use": "The port is taken: choose another one, or port=0 for a free one.",
    "No space left on device": "The disk is full: make room, or name another directory.",
    "could not create shared memory segment": "Give the server less memory: lower shared_buffers.",
    "unrecognized configuration parameter": "Remove the setting that this PostgreSQL does not know.",
    "invalid value for parameter": "Correct the setting.",
    "database files are incompatible": "Use the PostgreSQL that made the directory, or name another.",
}

# The supervisors that this process started, by directory; they may outlive the Server objects.
_started: dict[Path, subprocess.Popen[bytes]] = {}


def launch(
    home: Home,
    binaries: Binaries,
    *,
    port: int | None,
    settings: Mapping[str, object],
    temporary: bool,
    timeout: float,
) -> None:
    """Start a supervisor and wait until its server is ready.

    Raises:
        EmbeddedError: with what the server had to say.
    """
    previous = _started.pop(home.path, None)
    if previous is not None:
        previous.wait(timeout)
    home.rotate_log()
    identity = choose(home.path, home.data, binaries.postgres)
    identity.give(home.path)
    home.password()
    identity.give(home.password_file)
    binaries, staged = stage(binaries, identity)
    job = _job(home, binaries, identity, port, settings)
    job["timeout"] = timeout
    job["remove"] += [str(staged)] * (staged is not None) + [str(home.path)] * temporary
    with home.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=home.path,
            start_new_session=True,  # Ctrl-C is for the users of the server; it goes when they go
        )
    _started[home.path] = process
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as answer:
        with process.stdin as question:
            question.write(json.dumps(job).encode())
        # initdb has no limit of its own in the supervisor, hence the margin.
        ready, _, _ = select.select([answer], [], [], timeout + 30)
        line = answer.readline() if ready else b""
    result: dict[str, Any] = json.loads(line) if line else {"failed": "start", "log": tail(home.log)}
    if "failed" in result:
        if not line:
            process.kill()
        process.wait()
        raise _error(home, result["failed"], result["log"])


def wait_until_stopped(home: Home, deadline: float) -> None:
    """Wait for a server that was let go, unless other users keep it."""
    while not _stopped_or_shared(home) and time.monotonic() < deadline:
        time.sleep(0.01)
    process = _started.get(home.path)
    if process is not None and not _running(home):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            del _started[home.path]


def forget() -> None:
    """At the end of this process, leave supervisors to those who share their servers."""
    for process in _started.values():
        if process.poll() is None:
            process.returncode = 0  # or it would warn of a child left running, which is the intention
    _started.clear()


def _running(home: Home) -> bool:
    try:
        return home.locked("supervisor.lock")
    except FileNotFoundError:
        return False


def _stopped_or_shared(home: Home) -> bool:
    try:
        if not home.locked("supervisor.lock"):
            return True
        # Shared by others: a shared lock can be had, an exclusive one cannot.
        return home.locked("holders.lock", fcntl.LOCK_EX) and not home.locked("holders.lock", fcntl.LOCK_SH)
    except FileNotFoundError:
        return True


def tail(log: Path, size: int = 4000) -> str:
    """The end of the server log."""
    try:
        return log.read_bytes()[-size:].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _job(
    home: Home, binaries: Binaries, identity: Identity, port: int | None, settings: Mapping[str, object]
) -> dict[str, Any]:
    socket_dir = home.path
    if len(str(socket_dir).encode()) > SOCKET_DIR_LIMIT:
        socket_dir = Path(tempfile.mkdtemp(prefix="postbus-", dir=_short_temporary_directory()))
        identity.give(socket_dir)
    number = (port or _free_port()) if port is not None else 5432
    options = {
        **settings,
        "listen_addresses": "" if port is None else "127.0.0.1",
        "port": number,
        "unix_socket_directories": socket_dir,
        "unix_socket_permissions": "0700",
        "logging_collector": "off",
        "log_destination": "stderr",
    }
    locale = ["--locale=C"]
    if binaries.major >= 17:
        locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    initdb = [str(binaries.initdb), "-U", "postgres", "-E", "UTF8", *locale, "--no-instructions"]
    initdb += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={home.password_file}"]
    if settings.get("fsync") == "off":
        initdb.append("--no-sync")
    # A change of user clears the wish to die with the parent, so setpriv has to make it anew.
    setpriv = shutil.which("setpriv") if identity.prefix else None
    return {
        "home": str(home.path),
        "remove": [str(socket_dir)] if socket_dir != home.path else [],
        "prefix": list(identity.prefix),
        "die_with_parent": [setpriv, "--pdeathsig", "INT", "--"] if setpriv else [],
        "initdb": initdb,
        "postgres": [str(binaries.postgres), *(f"--{key}={_text(value)}" for key, value in options.items())],
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _short_temporary_directory() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) < SOCKET_DIR_LIMIT - 20 else "/tmp"  # noqa: S108 - mkdtemp makes it 0700


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _error(home: Home, step: str, log: str) -> EmbeddedError:
    remedy = next((remedy for text, remedy in _REMEDIES.items() if text in log), None)
    return EmbeddedError(
        f"PostgreSQL in {home.path} did not {step}"
        if step.startswith("start")
        else f"{step} failed in {home.path}",
        remedy=remedy or f"The text above says why; the whole log is {home.log}.",
        log=log,
    )
