"""Runs one PostgreSQL for as long as some process holds it, then stops it.

`Server.start` runs this file by its path in a process of its own, with a job in JSON on standard input,
and reads one line of JSON back. It imports the standard library only, so that it starts in a blink.

The supervisor waits for an exclusive lock on ``holders.lock``. Every user of the server holds that lock
shared, and the kernel releases it when a process ends, even by kill -9: getting the lock means that the
last user has gone. On Linux the server in turn gets SIGINT (a fast shutdown) if the supervisor dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 30.0
_LEFTOVERS = ("pre-existing shared memory block", 'lock file "postmaster.pid" already exists')


class _StepError(Exception):
    """A step did not work; carries its name and the end of its output."""


def main() -> None:
    """Make the cluster if there is none, run the server, stop it after its last user."""
    job: dict[str, Any] = json.load(sys.stdin)
    home = Path(job["home"])
    signal.signal(signal.SIGTERM, _on_term)
    supervisor_lock = os.open(home / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    holders_lock = os.open(home / "holders.lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not _only_one(supervisor_lock):
        _report({"pid": 0})
        return
    server: subprocess.Popen[bytes] | None = None
    try:
        _make_cluster(job, home)
        server = _start(job, home)
        _report({"pid": server.pid})
        watch = threading.Thread(target=_end_with, args=(server, job), daemon=True)
        watch.start()
        fcntl.flock(holders_lock, fcntl.LOCK_EX)
    except _StepError as exc:
        _report({"failed": exc.args[0], "log": exc.args[1]})
    except SystemExit:
        pass
    if server is not None:
        _stop(server)
    _clean(job)


def _only_one(lock: int) -> bool:
    """Whether this is the only supervisor here; the starter of another one may have been killed."""
    deadline = time.monotonic() + 1.0  # a look at the lock, by others, holds it for a moment
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def _on_term(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit


def _make_cluster(job: dict[str, Any], home: Path) -> None:
    """Run initdb beside the final place and rename, so that a half-made cluster is never used."""
    if (home / "data" / "PG_VERSION").exists():
        return
    new = home / "data.new"
    shutil.rmtree(new, ignore_errors=True)
    command = [*job["prefix"], *job["initdb"], "-D", str(new)]
    done = subprocess.run(command, capture_output=True, cwd=home, env=_environment(), check=False)
    if done.returncode != 0:
        raise _StepError("initdb", (done.stdout + done.stderr).decode(errors="replace")[-4000:])
    new.rename(home / "data")


def _start(job: dict[str, Any], home: Path) -> subprocess.Popen[bytes]:
    """Start the server and wait until it accepts connections."""
    deadline = time.monotonic() + job["timeout"]
    while True:
        _clear_stale_pid(home)
        log = home / "server.log"
        start_of_log = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            server = subprocess.Popen(
                [*job["prefix"], *job["die_with_parent"], *job["postgres"], "-D", str(home / "data")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=home,
                env=_environment(),
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        while server.poll() is None and time.monotonic() < deadline:
            if _ready(home, server.pid):
                return server
            time.sleep(0.01)
        with log.open("rb") as file:
            file.seek(start_of_log)
            tail = file.read().decode(errors="replace")[-4000:]
        if server.returncode is None:
            _stop(server)
            raise _StepError("start in time", tail)
        # After a kill -9 of the server its children need a moment to notice and go.
        if not any(text in tail for text in _LEFTOVERS) or time.monotonic() > deadline:
            raise _StepError("start", tail)
        time.sleep(0.2)


def _ready(home: Path, pid: int) -> bool:
    try:
        lines = (home / "data" / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _clear_stale_pid(home: Path) -> None:
    """Deal with a ``postmaster.pid`` that outlived its supervisor.

    The number may by now belong to a stranger (after a reboot, or in a new container): PostgreSQL would
    refuse to start, so the file is removed. If it still is our server, it is shut down. If no such process
    exists, PostgreSQL sorts it out itself, and more carefully than we could.
    """
    file = home / "data" / "postmaster.pid"
    try:
        pid = int(file.read_text().splitlines()[0])
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        return
    except PermissionError:
        file.unlink()
        return
    if str(home / "data") not in _command_of(pid):
        file.unlink(missing_ok=True)
        return
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + _STOP_SECONDS
    while file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _command_of(pid: int) -> str:
    if Path("/proc/self/cmdline").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _die_with_parent() -> None:
    """Ask Linux for SIGINT when the supervisor dies; elsewhere there is no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _environment() -> dict[str, str]:
    """Keep PGPORT, PGDATA and their like away from the server; keep its messages in English."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_"))}
    return env | {"LC_ALL": "C"}


def _report(result: dict[str, Any]) -> None:
    """Tell the starter, and let go of its pipe. The starter may be dead by now, which is fine."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(result).encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)


def _end_with(server: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    """End the supervisor as soon as the server ends, whoever ended it."""
    server.wait()
    _clean(job)
    os._exit(0)


def _stop(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        server.send_signal(number)
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def _clean(job: dict[str, Any]) -> None:
    for path in job["remove"]:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
