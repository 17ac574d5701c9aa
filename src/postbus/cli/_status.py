"""``postbus status``: everything at a glance, and what to do about it."""

from __future__ import annotations

import json

import psycopg
from rich.text import Text

from postbus import __version__
from postbus.cli import _groups, _queues, _schedules, _streams
from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._print import console, done, notes, plain, table
from postbus.engine import Connection

# What lasts longer is worth a warning: an open transaction, messages that nobody works on.
_OLD = "15 minutes"

_STREAMS = {
    k: _streams.COLUMNS[k] for k in ("name", "lanes", "events", "size_bytes", "scheduled", "last_tick_at")
}
_GROUPS = {
    k: _groups.COLUMNS[k]
    for k in ("stream", "group", "ordering", "lag", "pending", "in_flight", "waiting", "dead_letters")
}
_QUEUES = {
    k: _queues.COLUMNS[k]
    for k in ("name", "ready", "delayed", "in_flight", "oldest_age", "dead_letters", "expired")
}
_SCHEDULES = {k: _schedules.COLUMNS[k] for k in ("name", "cron", "timezone", "target", "last_at", "next_at")}


def status(dsn: Dsn = None, as_json: Json = False) -> None:
    """Show version, streams, groups, queues and schedules, and warn with remedies.

    Example: postbus status --dsn postgresql://localhost/shop
    """
    with connect(dsn) as conn:
        version = value(conn, "select postbus.version()")
        server = value(conn, "select current_setting('server_version')")
        database = value(conn, "select current_database()")
        streams = rows(conn, "select * from postbus.list_streams()")
        groups = rows(conn, "select * from postbus.list_groups()")
        queues = rows(conn, "select * from postbus.list_queues()")
        schedules = rows(conn, "select * from postbus.list_schedules()")
        warnings = _warnings(conn)
    if as_json:
        found = {
            "version": version,
            "client_version": __version__,
            "server_version": server,
            "database": database,
            "streams": [{k: plain(v) for k, v in row.items()} for row in streams],
            "groups": [{k: plain(v) for k, v in row.items()} for row in groups],
            "queues": [{k: plain(v) for k, v in row.items()} for row in queues],
            "schedules": [{k: plain(v) for k, v in row.items()} for row in schedules],
            "warnings": warnings,
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    done(f"postbus {version} in database {database}, PostgreSQL {server}")
    out = console()
    out.print()
    table(_STREAMS, streams, title="Streams", empty="no streams yet: postbus streams create NAME")
    out.print()
    table(_GROUPS, groups, title="Groups", empty="no groups yet: postbus groups create STREAM GROUP")
    out.print()
    table(_QUEUES, queues, title="Queues", empty="no queues yet: postbus queues create NAME")
    out.print()
    if schedules:
        table(_SCHEDULES, schedules, title="Schedules", empty="")
        out.print()
    if not warnings:
        out.print(Text("nothing to worry about", style="green"))
    for w in warnings:
        word, style = ("problem", "bold red") if w["level"] == "fail" else ("warning", "bold yellow")
        out.print(Text.assemble((f"{word}: ", style), f"{w['about']} {w['problem']}"), soft_wrap=True)
        out.print(Text.assemble("  remedy: ", (w["remedy"], "cyan")), soft_wrap=True)


def _warnings(conn: Connection) -> list[dict[str, str]]:
    try:
        found = rows(conn, "select * from postbus.health(%s::interval)", _OLD)
    except psycopg.errors.InsufficientPrivilege:
        notes().print("postbus: no warnings: this role may not call postbus.health()", soft_wrap=True)
        return []
    return [
        {"level": f["level"], "about": f["object"], "problem": f["message"], "remedy": f["remedy"]}
        for f in found
    ]
