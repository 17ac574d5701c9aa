"""``postbus status``: everything at a glance, and what to do about it."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import psycopg
from rich.text import Text

from postbus import __version__
from postbus.cli import _groups, _queues, _schedules, _streams
from postbus.cli._connect import Dsn, Json, connect, rows, value
from postbus.cli._consume import dead_tails
from postbus.cli._print import console, done, plain, short, table
from postbus.engine import Connection

Warning_ = dict[str, str]

# A transaction that is open for longer is worth a warning.
_OLD = "15 minutes"
# Upkeep runs every second or so; a schedule that waits for longer tells that nobody runs it.
_LATE = timedelta(minutes=5)

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
        now = value(conn, "select postbus.now_()")
        warnings = [*_of_streams(streams), *_of_groups(groups), *_of_queues(queues)]
        warnings += [*_of_schedules(schedules, now), *_of_upkeep(conn), *_of_transactions(conn)]
        warnings += [
            _warn(f"group {g['group']}", "is left over from a tail that was killed", "postbus maintain")
            for g in dead_tails(conn)
        ]
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
        out.print(Text.assemble(("warning: ", "bold yellow"), f"{w['about']} {w['problem']}"), soft_wrap=True)
        out.print(Text.assemble("  remedy: ", (w["remedy"], "cyan")), soft_wrap=True)


def _warn(about: str, problem: str, remedy: str) -> Warning_:
    return {"about": about, "problem": problem, "remedy": remedy}


def _of_streams(streams: list[dict[str, Any]]) -> list[Warning_]:
    found = []
    for s in streams:
        if s["paused"]:
            found.append(_warn(f"stream {s['name']}", "is paused", f"postbus resume {s['name']}"))
        if s["dead_letters"]:
            text = f"has {s['dead_letters']} dead letters"
            found.append(_warn(f"stream {s['name']}", text, f"postbus dlq list {s['name']}"))
    return found


def _of_groups(groups: list[dict[str, Any]]) -> list[Warning_]:
    found = []
    for g in groups:
        about = f"group {g['group']} of stream {g['stream']}"
        if g["lost"]:
            text = "lost its position: it fell behind max_retain, and events it had not read are gone"
            found.append(_warn(about, text, f"postbus seek {g['stream']} {g['group']} earliest"))
        if g["paused"]:
            found.append(_warn(about, "is paused", f"postbus resume {g['stream']} --group {g['group']}"))
    return found


def _of_queues(queues: list[dict[str, Any]]) -> list[Warning_]:
    found = []
    for q in queues:
        about = f"queue {q['name']}"
        if q["paused"]:
            found.append(_warn(about, "is paused", f"postbus resume {q['name']}"))
        if q["dead_letters"]:
            text = f"has {q['dead_letters']} dead letters"
            found.append(_warn(about, text, f"postbus dlq list {q['name']}"))
        if q["max_size"] is not None and q["ready"] + q["delayed"] + q["in_flight"] >= q["max_size"]:
            text = f"is full: it has the {q['max_size']} messages that it may have, and refuses more"
            found.append(_warn(about, text, "start more workers, or raise max_size"))
    return found


def _of_schedules(schedules: list[dict[str, Any]], now: datetime) -> list[Warning_]:
    found = []
    for s in schedules:
        about = f"schedule {s['name']}"
        if s["paused"]:
            found.append(_warn(about, "is paused", f"postbus schedules resume {s['name']}"))
        elif s["next_at"] < now - _LATE:
            text = f"should have fired {short(now - s['next_at'])} ago"
            found.append(_warn(about, text, "postbus maintain --every 1"))
        if s["problem"]:
            found.append(_warn(about, f"could not fire: {s['problem']}", "postbus schedules"))
    return found


def _of_upkeep(conn: Connection) -> list[Warning_]:
    """Upkeep counts events at the newest tick; one that stays uncounted tells that nobody runs it."""
    # Only the owner may look at the tables.
    with suppress(psycopg.errors.InsufficientPrivilege):
        since = value(
            conn,
            """select max(postbus.now_() - t.at) from postbus.stream s
            cross join lateral (
              select * from postbus.tick t where t.stream_id = s.id order by t.id desc limit 1) t
            where t.total is null and t.at < postbus.now_() - interval '5 minutes'""",
        )
        if since is not None:
            text = f"has not been run for {short(since)}: nothing is rotated, truncated or delivered late"
            return [_warn("upkeep", text, "postbus maintain --every 1")]
    return []


def _of_transactions(conn: Connection) -> list[Warning_]:
    """Old transactions keep dead rows alive and segments locked; ticks and consumers go on regardless."""
    found = []
    for t in rows(
        conn,
        """select pid, coalesce(nullif(application_name, ''), usename, '?') as who,
            clock_timestamp() - xact_start as age
        from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
          and xact_start < clock_timestamp() - %s::interval order by xact_start limit 5""",
        _OLD,
    ):
        text = f"of {t['who']} has been open for {short(t['age'])}: dead rows pile up, segments stay full"
        remedy = f"end it, or: select pg_terminate_backend({t['pid']})"
        found.append(_warn(f"transaction (pid {t['pid']})", text, remedy))
    for t in rows(
        conn,
        """select gid, clock_timestamp() - prepared as age from pg_prepared_xacts
        where database = current_database() and prepared < clock_timestamp() - %s::interval
        order by prepared limit 5""",
        _OLD,
    ):
        text = f"has been waiting for {short(t['age'])}: what it published is not seen, and dead rows pile up"
        quoted = t["gid"].replace("'", "''")
        remedy = f"commit prepared '{quoted}', or rollback prepared '{quoted}'"
        found.append(_warn(f"prepared transaction {t['gid']}", text, remedy))
    return found
