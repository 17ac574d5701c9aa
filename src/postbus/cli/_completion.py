"""Shell completion of what commands take: names from the database, and the few fixed words.

Silent and quick: a database that cannot be asked gives no names. Without a DSN there are none either; no
server is started for a press of the tab key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from postbus.cli._connect import chosen, with_defaults

# The least that libpq takes.
_CONNECT_SECONDS = 2
_ANSWER = "1s"

_QUEUES = "select name from postbus.list_queues(0)"
_STREAMS = "select name from postbus.list_streams()"
_SCHEDULES = "select name from postbus.list_schedules()"
_BOTH = f"{_QUEUES} union {_STREAMS}"
_GROUPS = """select "group" from postbus.list_groups() where stream = %s"""

# By the name of the parameter; those called `name` by the command above.
_ASKED = {"queue": _QUEUES, "to": _QUEUES, "stream": _STREAMS, "target": _BOTH, "group": _GROUPS}
_NAMES = {"queues": _QUEUES, "streams": _STREAMS, "schedules": _SCHEDULES, "unschedule": _SCHEDULES}
_NEW = {("queues", "create", "name"), ("streams", "create", "name"), ("groups", "create", "group")}
_WORDS = {
    ("peek", "state"): ("ready", "delayed", "in_flight"),
    ("seek", "position"): ("earliest", "latest"),
    ("tail", "start"): ("earliest", "latest"),
    ("groups", "create", "start"): ("earliest", "latest"),
    ("groups", "create", "ordering"): ("key", "stream", "none"),
    ("queues", "create", "on_ack"): ("delete", "archive"),
    ("queues", "alter", "on_ack"): ("delete", "archive"),
    ("schedule", "missed"): ("once", "all", "skip"),
}

Completer = Callable[[Any, Any, str], list[str]]


def attach(root: Any) -> None:
    """Give every parameter below `root` that takes such a name its completion."""
    for path, param in _parameters(root, ()):
        complete = _completer((*path, param.name))
        if complete is not None:
            param._custom_shell_complete = complete


def _parameters(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for param in command.params:
        yield path, param
    for name, below in getattr(command, "commands", {}).items():
        yield from _parameters(below, (*path, name))


def _completer(path: tuple[str, ...]) -> Completer | None:
    if path in _WORDS:
        words = _WORDS[path]
        return lambda ctx, param, incomplete: [word for word in words if word.startswith(incomplete)]
    query = _NAMES.get(path[0], _BOTH) if path[-1] == "name" else _ASKED.get(path[-1])
    if query is None or path in _NEW or path == ("schedule", "name"):
        return None
    return lambda ctx, param, incomplete: _names(ctx, query, incomplete)


def _names(ctx: Any, query: str, incomplete: str) -> list[str]:
    try:
        dsn = chosen(_given(ctx, "dsn"))
        if dsn is None:
            return []
        # The stream of a group stands before it on the line; after a bare --group it is not parsed yet.
        stream = _given(ctx, "stream") or _given(ctx, "name") or next(iter(ctx.args), None)
        args = [stream] if query == _GROUPS else []
        target = make_conninfo(with_defaults(dsn), connect_timeout=_CONNECT_SECONDS)
        with closing(psycopg.connect(target, prepare_threshold=None)) as conn:
            # Not at connecting: poolers refuse that.
            conn.execute("select set_config('statement_timeout', %s, true)", (_ANSWER,))
            found = [str(row[0]) for row in conn.execute(query.encode(), args)]
    except Exception:
        return []
    return sorted(name for name in found if name.startswith(incomplete) and not name.startswith("tail:"))


def _given(ctx: Any, name: str) -> str | None:
    while ctx is not None:
        found = ctx.params.get(name)
        if found:
            return str(found)
        ctx = ctx.parent
    return None
