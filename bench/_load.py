"""Load from many clients at once: pgbench, or processes of our own where there is none."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench._peers import call, prepare
from postbus.embedded import find_binaries
from postbus.errors import EmbeddedError


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


def run(dsn: str, script: Script, *, clients: int, seconds: int, synchronous_commit: str) -> float:
    """Transactions per second of so many clients."""
    options = f"-c synchronous_commit={synchronous_commit}"
    pgbench = find_pgbench()
    if pgbench is None:
        return _processes(dsn, script, clients, seconds, options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sql"
        file.write_text(script.for_pgbench(), encoding="utf-8")
        command = [pgbench, "-n", "-M", "prepared", "-f", str(file), "-D"]
        command.append("first=1" if script.parameter is None else f"parameter={script.parameter}")
        command += ["-c", str(clients), "-j", str(min(2, clients)), "-T", str(seconds), dsn]
        env = {**os.environ, "PGOPTIONS": options}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    if done.returncode or found is None or "aborted" in done.stderr:
        raise RuntimeError(f"pgbench failed:\n{done.stdout}{done.stderr}")
    return float(found[1])


def _processes(dsn: str, script: Script, clients: int, seconds: int, options: str) -> float:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(clients) as pool:
        counts = pool.starmap(_client, [(dsn, script, seconds, options)] * clients, chunksize=1)
    return sum(counts) / seconds


def _client(dsn: str, script: Script, seconds: int, options: str) -> int:
    with psycopg.connect(dsn, autocommit=True, options=options) as conn:
        if script.parameter is None:
            parameter = conn.pgconn.exec_(script.load.encode()).get_value(0, 0) or b""
        else:
            parameter = script.parameter.encode()
        prepare(conn.pgconn, b"call", script.statement.format("$1").encode())
        end = time.monotonic() + seconds
        count = 0
        while time.monotonic() < end:
            call(conn.pgconn, b"call", [parameter])
            count += 1
    return count
