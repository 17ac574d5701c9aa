"""CPU time of the server: what a call costs, even where a busy machine blurs how long it takes.

It is read from /proc, so there is none where the server runs elsewhere or on another system than Linux.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench._database import Connection, Database


def of_connection(conn: Connection) -> float | None:
    """Seconds that the backend of a connection has used so far."""
    if not conn.info.host.startswith("/"):
        return None
    try:
        return int(Path(f"/proc/{conn.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return None


def of_ended_backends(db: Database) -> float | None:
    """Seconds that all backends which have ended so far have used; waits for those that are just ending."""
    with db.connect() as conn:
        if of_connection(conn) is None:
            return None
        end = time.monotonic() + 10
        while time.monotonic() < end and _others(conn):
            time.sleep(0.01)
        postmaster = int(_stat(conn.info.backend_pid)[1])
        used = -1
        while used != (used := sum(map(int, _stat(postmaster)[13:15]))):
            time.sleep(0.1)
    return used / os.sysconf("SC_CLK_TCK")


def _others(conn: Connection) -> int:
    row = conn.execute(
        """select count(*) from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""
    ).fetchone()
    assert row is not None
    return int(row[0])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
