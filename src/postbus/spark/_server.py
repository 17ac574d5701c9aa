"""The driver's side of the database: calls that outlive a lost connection."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from postbus.errors import BadArgument, NotFound, PostbusError, WrongVersion, translated

GONE = (psycopg.OperationalError, psycopg.InterfaceError)
PATIENCE = 120.0  # seconds for a server to come back before the query fails


def position_text(position: Any) -> str:
    """A position of an offset as the engine's text."""
    return json.dumps(position)


class Server:
    """A connection that is made when it is needed, and made again when it is lost."""

    def __init__(self, dsn: str, option: str = "dsn") -> None:
        self.dsn = dsn
        self.option = option
        self._conn: psycopg.Connection[Any] | None = None

    def connect(self) -> psycopg.Connection[Any]:
        """Connect once, with a message that names the option and never the password."""
        try:
            known = conninfo_to_dict(self.dsn)
        except psycopg.Error as exc:
            raise BadArgument(f"option {self.option} is not a connection string: {exc}") from exc
        return psycopg.connect(
            self.dsn,
            autocommit=True,
            prepare_threshold=None,  # PgBouncer in transaction mode
            client_encoding="UTF8",  # what Arrow has
            connect_timeout=int(known.get("connect_timeout") or 10),
            application_name=str(known.get("application_name") or "postbus spark"),
        )

    def check(self) -> None:
        """Connect and look for the engine; say what is wrong and what to do."""
        try:
            self._conn = self.connect()
        except psycopg.OperationalError as exc:
            raise PostbusError(
                f"cannot connect with option {self.option} ({safe(self.dsn)})",
                detail=str(exc).strip(),
                hint="Check host, port, database, user and password; the server must be running.",
            ) from exc
        # From here on the server is known to be there: sinks ask before each micro-batch.
        (row,) = self.rows(
            "select bool_or(proname = 'read_columns'), bool_and(proname <> 'read_columns'"
            " or has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute'))"
            " from pg_namespace n join pg_proc p on p.pronamespace = n.oid where n.nspname = 'postbus'"
        )
        if row[0] is None:
            raise NotFound(
                f"there is no postbus engine in the database of option {self.option} ({safe(self.dsn)})",
                hint="Install it: postbus install.",
            )
        if not row[0]:
            raise WrongVersion(
                f"the engine in the database of option {self.option} ({safe(self.dsn)}) has no windows yet",
                hint="Upgrade it: postbus upgrade.",
            )
        if not row[1]:
            raise PostbusError(
                f"the user of option {self.option} ({safe(self.dsn)}) may not read streams",
                hint="Grant it: grant postbus_reader to the user.",
            )

    def connection(self) -> psycopg.Connection[Any]:
        """The connection, a new one if the last is gone."""
        if self._conn is None or self._conn.closed:
            self._conn = self.connect()
        return self._conn

    def rows(self, query: str, *args: Any) -> list[Any]:
        """Run a statement that can be repeated; while the connection is lost, make it again."""
        deadline = time.monotonic() + PATIENCE
        pause = 0.05
        while True:
            try:
                with translated():
                    return self.connection().execute(query.encode(), args).fetchall()
            except psycopg.errors.QueryCanceled:
                raise
            except GONE:
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 5.0)

    def value(self, query: str, *args: Any) -> Any:
        """The one value of the one row."""
        (row,) = self.rows(query, *args)
        return row[0]

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_conn": None}

    # What the source asks of the engine.

    def streams(self) -> list[str]:
        return [row[0] for row in self.rows("select name from postbus.list_streams()")]

    def groups(self) -> set[tuple[str, str]]:
        return {(s, g) for s, g in self.rows('select stream, "group" from postbus.list_groups()')}

    def positions(self, streams: Iterable[str], at: str, holder: str | None) -> dict[str, Any]:
        query = "select s, postbus.position(s, %s, %s) from unnest(%s::text[]) s"
        return {s: json.loads(p) for s, p in self.rows(query, at, holder, list(streams))}

    def hold(self, stream: str, position: Any, holder: str) -> Any:
        query = "select postbus.hold_position(%s, %s, %s)"
        return json.loads(self.value(query, stream, position_text(position), holder))

    def release(self, holder: str) -> None:
        self.rows("select postbus.release_positions(%s)", holder)

    def bound(self, stream: str, since: Any, until: Any, most: int, holder: str) -> Any:
        query = "select postbus.bound_window(%s, %s, %s, %s, %s)"
        return json.loads(self.value(query, stream, position_text(since), position_text(until), most, holder))

    def count(self, stream: str, since: Any, until: Any, most: int) -> int:
        query = "select postbus.count_window(%s, %s, %s, %s)"
        return int(self.value(query, stream, position_text(since), position_text(until), most))

    def plan(
        self, stream: str, since: Any, until: Any, parts: int = 1, most: int | None = None
    ) -> list[tuple[str, int]]:
        query = "select part, events from postbus.plan_window(%s, %s, %s, %s, %s)"
        return self.rows(query, stream, position_text(since), position_text(until), parts, most)

    def follow(self, stream: str, group: str, position: Any) -> None:
        self.rows("select postbus.follow_group(%s, %s, %s)", stream, group, position_text(position))


def safe(dsn: str) -> str:
    """A DSN to show: without its password."""
    try:
        known = conninfo_to_dict(dsn)
    except psycopg.Error:
        return "..."
    return " ".join(f"{k}={v}" for k, v in known.items() if k in ("host", "port", "dbname", "user"))
