"""Load from many clients at once: pgbench, or processes of our own where there is none."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psycopg

from bench._database import Connection
from bench._peers import call, prepare
from postbus.embedded import find_binaries
from postbus.errors import EmbeddedError


class Work(Protocol):
    """What one client does over and over."""

    def for_pgbench(self) -> str:
        """The script of one turn."""

    def variables(self) -> dict[str, str]:
        """The variables that the script begins with."""

    def turn(self, conn: Connection) -> Callable[[], None]:
        """One turn on a connection, for where there is no pgbench."""


# Workers keep their connections: connecting, compiling functions and making plans happens before the clock
# starts. It takes 64 clients the better part of a second.
WARM_UP = 1


@dataclass(frozen=True)
class Count:
    """How often the clients had their turn in all, and how often a second after the warm-up."""

    turns: int
    rate: float


@dataclass(frozen=True)
class Script:
    """A statement with one parameter, which every client sends anew with each transaction.

    Attributes:
        statement: with ``{}`` where the parameter goes.
        parameter: its value; or
        load: a query that makes it, run once per client, where it is too long for a command line.
    """

    statement: str
    parameter: str | None = None
    load: str = ""

    def for_pgbench(self) -> str:
        """The script: load the parameter on the first turn, and send it with every statement."""
        if self.parameter is not None:
            return f"{self.statement.format(':parameter')};\n"
        load = f"\\if :first\n{self.load} as parameter \\gset\n\\set first 0\n\\endif\n"
        return f"{load}{self.statement.format(':parameter')};\n"

    def variables(self) -> dict[str, str]:
        """The parameter, or that it is still to be loaded."""
        return {"first": "1"} if self.parameter is None else {"parameter": self.parameter}

    def turn(self, conn: Connection) -> Callable[[], None]:
        """Send the statement."""
        if self.parameter is None:
            parameter = conn.pgconn.exec_(self.load.encode()).get_value(0, 0) or b""
        else:
            parameter = self.parameter.encode()
        prepare(conn.pgconn, b"call", self.statement.format("$1").encode())

        def send() -> None:
            call(conn.pgconn, b"call", [parameter])

        return send


def find_pgbench() -> str | None:
    """The pgbench next to the server's binaries, else one on the path."""
    try:
        beside = find_binaries().bindir / "pgbench"
    except EmbeddedError:
        return shutil.which("pgbench")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("pgbench")


def generator() -> str:
    """What makes the load, for the report."""
    return "pgbench -M prepared" if find_pgbench() else "psycopg processes"


def run(dsn: str, work: Work, *, clients: int, seconds: int, synchronous_commit: str) -> float:
    """Transactions per second of so many clients."""
    options = f"-c synchronous_commit={synchronous_commit}"
    if find_pgbench() is None:
        return _processes(dsn, work, clients, seconds, options).rate
    found = _pgbench(r"^tps = ([\d.]+)", dsn, work, clients=clients, seconds=seconds, options=options)
    return float(found[0][0])


def count(dsn: str, work: Work, *, clients: int, seconds: int, synchronous_commit: str) -> Count:
    """Let so many clients work for so long after a warm-up."""
    options = f"-c synchronous_commit={synchronous_commit}"
    if find_pgbench() is None:
        return _processes(dsn, work, clients, seconds + WARM_UP, options)
    wanted = r"processed: (\d+)|^tps = ([\d.]+)|progress: ([\d.]+) s, ([\d.]+) tps"
    found = _pgbench(wanted, dsn, work, clients=clients, seconds=seconds + WARM_UP, options=options)
    (turns,) = (int(match[0]) for match in found if match[0])
    (rate,) = (float(match[1]) for match in found if match[1])
    # A line a second or so, of the time since the line before it: what the first one says is the warm-up.
    lines = [(float(match[2]), float(match[3])) for match in found if match[2]]
    warm_up, warm_rate = lines[0] if lines else (0.0, 0.0)
    return Count(turns, (turns - warm_up * warm_rate) / (turns / rate - warm_up))


def _pgbench(
    wanted: str, dsn: str, work: Work, *, clients: int, seconds: int, options: str
) -> list[tuple[str, ...]]:
    """What a run of pgbench says that matches `wanted`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sql"
        file.write_text(work.for_pgbench(), encoding="utf-8")
        command = [find_pgbench() or "pgbench", "-n", "-M", "prepared", "-f", str(file), "-P", "1"]
        for name, value in work.variables().items():
            command += ["-D", f"{name}={value}"]
        command += ["-c", str(clients), "-j", str(min(2, clients)), "-T", str(seconds), dsn]
        env = {**os.environ, "PGOPTIONS": options}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    output = done.stdout + done.stderr
    found = [match.groups() for match in re.finditer(wanted, output, re.MULTILINE)]
    if done.returncode or not found or "aborted" in done.stderr:
        raise RuntimeError(f"pgbench failed:\n{output}")
    return found


def _processes(dsn: str, work: Work, clients: int, seconds: int, options: str) -> Count:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(clients) as pool:
        turns = sum(pool.starmap(_client, [(dsn, work, seconds, options)] * clients, chunksize=1))
    return Count(turns, turns / seconds)


def _client(dsn: str, work: Work, seconds: int, options: str) -> int:
    with psycopg.connect(dsn, autocommit=True, options=options) as conn:
        turn = work.turn(conn)
        end = time.monotonic() + seconds
        turns = 0
        while time.monotonic() < end:
            turn()
            turns += 1
    return turns
