"""What has to be true of a server before it is used."""

from __future__ import annotations

import time

import psycopg
from psycopg.conninfo import make_conninfo

from postbus.embedded._binaries import Binaries, find_binaries
from postbus.embedded._home import Home, Postmaster
from postbus.embedded._launch import tail
from postbus.errors import EmbeddedError


def fitting(home: Home, found: Binaries) -> Binaries:
    """Return binaries of the major version that made the data: no other can read them."""
    major = home.major()
    if major is None or major == found.major:
        return found
    try:
        return find_binaries(major)
    except EmbeddedError as exc:
        raise EmbeddedError(
            f"the data in {home.path} were made by PostgreSQL {major}, but the PostgreSQL found is "
            f"{found.version} ({found.provider}: {found.bindir})",
            remedy=f"Set POSTBUS_PG_BIN to the bin directory of a PostgreSQL {major}, "
            "or name another directory, or move this one away to start empty.",
        ) from exc


def wait_until_ready(home: Home, deadline: float) -> tuple[Postmaster, str]:
    """Wait until the server answers; return where it listens, and its version."""
    while True:
        found = home.postmaster()
        try:
            if found is not None:
                return found, _version(found)
            problem = "it does not say that it is ready"
        except psycopg.OperationalError as exc:
            problem = str(exc).strip()
        if time.monotonic() > deadline or not home.locked("supervisor.lock"):
            raise EmbeddedError(
                f"the server in {home.path} does not answer: {problem}",
                remedy=f"See {home.log}, and try again.",
                log=tail(home.log),
            )
        time.sleep(0.02)


def port(home: Home, found: Postmaster, wanted: int | None) -> None:
    """Check that a server that somebody else may have started listens where it should."""
    if wanted is None or (found.listen and wanted in (0, found.port)):
        return
    listens = f"on port {found.port}" if found.listen else "without TCP"
    raise EmbeddedError(
        f"the server in {home.path} already runs {listens}, not on port {wanted}",
        remedy="Stop the processes that use it first, or ask for the same port, or for none.",
    )


def _version(found: Postmaster) -> str:
    dsn = make_conninfo(host=found.socket_dir, port=found.port, user="postgres", dbname="postgres")
    with psycopg.connect(dsn, connect_timeout=10) as conn:
        return (conn.info.parameter_status("server_version") or "").split()[0]
