"""What ``postbus doctor`` tries out, and what it asks of the engine; and all checks in their order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from postbus import __version__, engine
from postbus.cli._checks import Finding, Level, connections, server, sessions, settings
from postbus.cli._connect import rows, value, with_defaults
from postbus.cli._print import short
from postbus.engine import Connection
from postbus.errors import PostbusError

_LISTEN_SECONDS = 2.0
_CLOCK_SECONDS = 2.0

# usual: bytes that a row takes at most, where no payload decides that.
_TABLES = """
select s.relname as name, s.n_live_tup as live, s.n_dead_tup as dead,
  clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum) as vacuumed,
  'autovacuum_enabled=false' = any (c.reloptions) or 'autovacuum_enabled=off' = any (c.reloptions) as off,
  pg_relation_size(c.oid) as bytes,
  case when s.relname in ('tick', 'progress', 'lease', 'dedupe', 'mark', 'key_state', 'key_wake', 'tally')
    then 300 end as usual
from pg_stat_user_tables s join pg_class c on c.oid = s.relid
where s.schemaname = 'postbus' order by s.relname
"""


def listen(conn: Connection) -> Iterator[Finding]:
    """Whether a notification comes through; a pooler in transaction mode swallows it."""
    channel = f"postbus.doctor.{secrets.token_hex(6)}"
    same = make_conninfo(**conn.info.get_parameters(), password=conn.info.password or None)
    conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
    began = time.monotonic()
    with closing(psycopg.connect(with_defaults(same), autocommit=True, prepare_threshold=None)) as other:
        other.execute("select pg_notify(%s, '')", (channel,))
        heard = any(True for _ in conn.notifies(timeout=_LISTEN_SECONDS, stop_after=1))
    took = time.monotonic() - began
    if heard:
        conn.execute(sql.SQL("unlisten {}").format(sql.Identifier(channel)))
        yield Finding("listen", "ok", f"a notification took {took * 1000:.0f} ms")
    else:
        yield Finding(
            "listen",
            "warn",
            "no notification comes through, as with a pooler in transaction mode: workers only poll",
            "give workers a DSN that leads to the server itself, or live with up to a second of delay",
        )
    usage = value(conn, "select pg_notification_queue_usage()")
    if usage > 0.1:
        yield Finding(
            "listen",
            "fail" if usage > 0.5 else "warn",
            f"the queue of notifications is {usage:.0%} full: when it is, nobody can commit a NOTIFY",
            "end the session that listens inside a transaction that stays open",
        )


def clock(conn: Connection) -> Iterator[Finding]:
    """The clocks of this machine and of the server, and whether the engine's is moved."""
    before = time.time()
    theirs = value(conn, "select extract(epoch from clock_timestamp())::float8")
    after = time.time()
    off, doubt = theirs - (before + after) / 2, (after - before) / 2
    ahead = f"{abs(off):.3f} s {'ahead of' if off > 0 else 'behind'} this machine's"
    if abs(off) > _CLOCK_SECONDS + doubt:
        yield Finding(
            "clock",
            "warn",
            f"the server's clock is {ahead}: due times reckoned here are wrong there",
            "synchronise the clocks, or pass delays rather than times",
        )
    else:
        yield Finding("clock", "ok", f"the server's clock is {ahead}")
    moved = value(conn, "select current_setting('postbus.fake_now', true)")
    if moved:
        yield Finding(
            "clock", "fail", f"the engine takes {moved} for now", "alter role ... reset postbus.fake_now"
        )


def installed(conn: Connection) -> Iterator[Finding]:
    """The engine, and whether this package goes with it."""
    try:
        there = engine.check(conn)
    except PostbusError as exc:
        yield Finding("engine", "fail", exc.message, exc.hint)
        return
    if there == __version__:
        yield Finding("engine", "ok", f"version {there}, as this package")
    else:
        yield Finding("engine", "warn", f"version {there}, this package is {__version__}", "postbus upgrade")


def tables(conn: Connection) -> Iterator[Finding]:
    """Dead rows and wasted space in the engine's tables, and whether autovacuum looks after them."""
    found: list[Finding] = []
    for t in rows(conn, _TABLES):
        name = f"postbus.{t['name']}"
        if t["off"]:
            text = f"autovacuum is off for {name}"
            found.append(Finding("tables", "warn", text, f"alter table {name} reset (autovacuum_enabled)"))
        if t["dead"] > 100_000 and t["dead"] > t["live"]:
            last = "never" if t["vacuumed"] is None else f"{short(t['vacuumed'])} ago"
            text = f"{name} has {t['dead']} dead rows beside {t['live']} live ones; last vacuumed: {last}"
            remedy = f"see what keeps them (sessions, above); then: vacuum {name}"
            found.append(Finding("tables", "warn", text, remedy))
        elif t["usual"] and t["bytes"] > max(64 * 2**20, 20 * t["live"] * t["usual"]):
            text = f"{name} takes {t['bytes'] // 2**20} MB for {t['live']} rows"
            found.append(Finding("tables", "warn", text, f"in a quiet hour: vacuum full {name}"))
    age = value(conn, "select age(datfrozenxid) from pg_database where datname = current_database()")
    if age > 1_000_000_000:
        level: Level = "fail" if age > 1_500_000_000 else "warn"
        text = f"the oldest row of the database is {age} transactions old; at 2 billion the server stops"
        found.append(Finding("tables", level, text, "end what holds vacuum back; then: vacuum (freeze)"))
    yield from found or [Finding("tables", "ok", "few dead rows, autovacuum on")]


def bus(conn: Connection) -> Iterator[Finding]:
    """What the engine itself has found: ``postbus.health()``."""
    found = [
        Finding("bus", row["level"], f"{row['object']} {row['message']}", row["remedy"])
        for row in rows(conn, "select * from postbus.health()")
        # Seen with the rights of this role above.
        if not row["object"].startswith("transaction (pid")
    ]
    yield from found or [Finding("bus", "ok", "nothing to worry about")]


CHECKS: dict[str, Callable[[Connection], Iterator[Finding]]] = {
    "server": server,
    "settings": settings,
    "connections": connections,
    "sessions": sessions,
    "listen": listen,
    "clock": clock,
    "engine": installed,
    "tables": tables,
    "bus": bus,
}


def run(conn: Connection) -> Iterator[Finding]:
    """All checks; one that cannot be made is a finding too, and the others go on."""
    for name, check in CHECKS.items():
        found = list(_guarded(name, check, conn))
        yield from found
        if name == "engine" and any(finding.level == "fail" for finding in found):
            return


def _guarded(
    name: str, check: Callable[[Connection], Iterator[Finding]], conn: Connection
) -> Iterator[Finding]:
    try:
        yield from check(conn)
    except psycopg.errors.InsufficientPrivilege as exc:
        text = (exc.diag.message_primary or str(exc)).strip()
        yield Finding(name, "warn", f"could not be checked: {text}", "use the role that installed Postbus")
    except psycopg.Error as exc:
        text = (exc.diag.message_primary or str(exc) or type(exc).__name__).strip().splitlines()[0]
        yield Finding(name, "fail", f"could not be checked: {text}")
