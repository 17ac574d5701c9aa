"""Where a bus connects to, and how."""

from __future__ import annotations

import os
import select
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row
from psycopg.types.array import ListBinaryDumper
from psycopg.types.json import set_json_loads

from postbus import engine
from postbus.errors import BadArgument, WrongVersion, translated

if TYPE_CHECKING:
    from postbus.embedded import Server

_CONNECT_SECONDS = 10
_NOTICE = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


class Target:
    """A database: the one of the DSN, of ``$POSTBUS_DSN``, or an embedded server of our own."""

    def __init__(self, dsn: str | None, *, install: bool = False) -> None:
        self._given = dsn
        self._install = install
        self._server: Server | None = None

    def start(self) -> str:
        """Make sure that the engine is there; returns the DSN."""
        dsn = self._given or os.environ.get("POSTBUS_DSN")
        embedded = not dsn
        if not dsn:
            from postbus.embedded import Server

            self._server = Server().start()
            dsn = self._server.dsn
        try:
            dsn = with_defaults(dsn)
            with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn, translated():
                if (embedded or self._install) and engine.installed_version(conn) is None:
                    engine.install(conn)
                try:
                    engine.check(conn)
                except WrongVersion:
                    if not embedded:
                        raise
                    engine.upgrade(conn)
        except BaseException:
            self.stop()
            raise
        return dsn

    def stop(self) -> None:
        """Let go of the embedded server, if there is one."""
        if self._server is not None:
            self._server.stop()
            self._server = None


def with_defaults(dsn: str) -> str:
    """Add a bound on the time to connect and a name to be known by, where the DSN has none."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as exc:
        raise BadArgument(
            f"the DSN cannot be read: {str(exc).strip()}",
            hint="Give a URL (postgresql://user@host/database) or key=value pairs (host=... dbname=...).",
        ) from exc
    # A server that vanishes without a word is noticed within about a minute, not a quarter of an hour.
    defaults: dict[str, Any] = {"fallback_application_name": "postbus", **_NOTICE}
    defaults = {name: value for name, value in defaults.items() if name not in given}
    if "connect_timeout" not in given and "PGCONNECT_TIMEOUT" not in os.environ:
        defaults["connect_timeout"] = _CONNECT_SECONDS
    if "client_encoding" not in given and "PGCLIENTENCODING" not in os.environ:
        defaults["client_encoding"] = "utf8"  # databases in SQL_ASCII would give bytes for text
    return make_conninfo(dsn, **defaults)


def worker_name() -> str:
    """What this process is called in the database."""
    return f"{socket.gethostname()}:{os.getpid()}"


def pool_options() -> dict[str, Any]:
    """How connections are made. Prepared statements come later, see `look_at`."""
    return {
        "min_size": 1,
        "kwargs": {"autocommit": True, "prepare_threshold": None, "row_factory": tuple_row},
        "name": "postbus",
        # Short, so that the pool does not sleep long between two tries; see AsyncBus._try_again.
        "reconnect_timeout": 2.0,
    }


def look_at(conn: Any, row: tuple[int] | None) -> None:
    """Set up a new connection, given the process that serves it.

    Behind a pooler that process is not the one that the connection was told about. Then statements may run
    on any server connection, where prepared ones do not exist.
    """
    set_json_loads(msgspec.json.decode, conn)
    conn.adapters.register_dumper(list, ListBinaryDumper)  # as text, a batch takes 30 times as long
    if row is not None and row[0] == conn.info.backend_pid:
        conn.prepare_threshold = 0


def is_quiet(conn: Any) -> bool:
    """Whether the server has said nothing to an idle connection; its last words are that it closes it."""
    poll = select.poll()  # unlike select() it takes any descriptor
    poll.register(conn.fileno(), select.POLLIN)
    return not poll.poll(0)
