"""What ``postbus doctor`` asks of the server: version, settings, room for connections, open transactions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from postbus.cli._connect import rows, value
from postbus.cli._print import short
from postbus.engine import Connection

Level = Literal["ok", "warn", "fail"]

_OLDEST_SERVER, _NEWEST_SERVER = 14, 18
# How long a transaction may be open, and how long do nothing.
_OPEN = "15 minutes"
_IDLE = "1 minute"
# Below this a timeout ends what workers and upkeep do for good reasons.
_SHORT_MS = 60_000


@dataclass(frozen=True)
class Finding:
    """What a check found. `remedy` is None where there is nothing to do."""

    check: str
    level: Level
    message: str
    remedy: str | None = None


def _set(name: str, text: str) -> str:
    return f"alter system set {name} = {text}; select pg_reload_conf()"


def _for_workers(name: str) -> str:
    return f"alter role ... set {name} = 0, for the roles of workers"


def server(conn: Connection) -> Iterator[Finding]:
    """The version, and whether it can be written to."""
    major = conn.info.server_version // 10000
    text = value(conn, "select current_setting('server_version')")
    if major < _OLDEST_SERVER:
        yield Finding(
            "server", "fail", f"PostgreSQL {text} is too old", f"upgrade to {_OLDEST_SERVER} or later"
        )
    elif major > _NEWEST_SERVER:
        yield Finding(
            "server", "warn", f"PostgreSQL {text} is newer than what was tested", "look for a newer postbus"
        )
    else:
        yield Finding("server", "ok", f"PostgreSQL {text}")
    if value(conn, "select pg_is_in_recovery()"):
        yield Finding(
            "server", "fail", "this is a standby: nothing can be written", "name the primary in the DSN"
        )
    elif value(conn, "select current_setting('default_transaction_read_only')") == "on":
        yield Finding(
            "server",
            "fail",
            "transactions are read-only here",
            "alter role ... reset default_transaction_read_only",
        )


def settings(conn: Connection) -> Iterator[Finding]:
    """Settings that lose data, stop vacuum or end workers."""
    query = "select name, setting from pg_settings where vartype in ('bool', 'integer', 'enum')"
    now: dict[str, str] = {row["name"]: row["setting"] for row in rows(conn, query)}
    found = [*_unsafe(now), *_timeouts(now)]
    if now["jit"] == "on" and value(conn, "select pg_jit_available()"):
        found.append(
            Finding(
                "settings",
                "warn",
                "jit is on: a misjudged short query costs tens of milliseconds",
                "alter role ... set jit = off, for the roles of workers",
            )
        )
    yield from found or [Finding("settings", "ok", "durable, vacuumed, no timeout in the way")]


def _unsafe(now: dict[str, str]) -> Iterator[Finding]:
    if now["fsync"] != "on":
        yield Finding(
            "settings", "fail", "fsync is off: a crash may destroy the database", _set("fsync", "on")
        )
    if now["full_page_writes"] != "on":
        yield Finding(
            "settings",
            "fail",
            "full_page_writes is off: a crash may leave torn pages",
            _set("full_page_writes", "on"),
        )
    if now["synchronous_commit"] == "off":
        yield Finding(
            "settings",
            "warn",
            "synchronous_commit is off: a crash loses the last moments, what was sent and what was acked",
            _set("synchronous_commit", "on"),
        )
    for name in ("autovacuum", "track_counts"):
        if now[name] != "on":
            yield Finding("settings", "fail", f"{name} is off: dead rows are never removed", _set(name, "on"))
    if now["default_transaction_isolation"] != "read committed":
        yield Finding(
            "settings",
            "fail",
            f"transactions are {now['default_transaction_isolation'].upper()} here: "
            "consume and receive refuse to work",
            "alter role ... set default_transaction_isolation = 'read committed', for the roles of workers",
        )


def _timeouts(now: dict[str, str]) -> Iterator[Finding]:
    reasons = {
        "statement_timeout": "ends upkeep and large batches",
        "transaction_timeout": "ends handlers that work in a transaction",
        "idle_in_transaction_session_timeout": "ends handlers that work in a transaction",
    }
    for name, reason in reasons.items():
        after = int(now.get(name, 0))
        if 0 < after < _SHORT_MS:
            yield Finding("settings", "warn", f"{name} is {after} ms: it {reason}", _for_workers(name))
    if int(now.get("idle_session_timeout", 0)) > 0:
        yield Finding(
            "settings",
            "warn",
            "idle_session_timeout is set: it ends workers that wait for messages",
            _for_workers("idle_session_timeout"),
        )


def connections(conn: Connection) -> Iterator[Finding]:
    """How many more sessions there may be."""
    [row] = rows(
        conn,
        """select (select count(*) from pg_stat_activity
            where coalesce(backend_type, 'client backend') = 'client backend' and datid is not null) as used,
          current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
            - coalesce(current_setting('reserved_connections', true)::int, 0) as there""",
    )
    share = row["used"] / row["there"]
    level: Level = "fail" if share >= 0.95 else "warn" if share >= 0.8 else "ok"
    remedy = (
        None if level == "ok" else "fewer or smaller pools, a connection pooler, or a larger max_connections"
    )
    yield Finding("connections", level, f"{row['used']} of {row['there']} in use", remedy)


def sessions(conn: Connection) -> Iterator[Finding]:
    """Transactions that keep dead rows alive, as far as this role may see them."""
    found = [
        Finding(
            "sessions",
            "warn",
            f"transaction (pid {t['pid']}) of {t['who']} has been open for {short(t['age'])}"
            f" ({t['state']}): dead rows pile up",
            f"end it, or: select pg_terminate_backend({t['pid']})",
        )
        for t in rows(
            conn,
            """select pid, coalesce(nullif(application_name, ''), usename, '?') as who,
              coalesce(state, '?') as state, clock_timestamp() - xact_start as age
            from pg_stat_activity
            where pid <> pg_backend_pid() and coalesce(backend_type, '') <> 'autovacuum worker'
              and coalesce(datname, current_database()) = current_database()
              and (xact_start < clock_timestamp() - %s::interval
                or state ^@ 'idle in transaction' and state_change < clock_timestamp() - %s::interval)
            order by xact_start limit 5""",
            *(_OPEN, _IDLE),
        )
    ]
    yield from found or [Finding("sessions", "ok", "no transaction is open for long")]
