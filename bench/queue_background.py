"""Receive in front of a background: many delayed and in-flight messages, or thousands of blocked keys."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench import _cpu, _queue_work
from bench._database import Connection, Database
from bench._main import single
from bench._options import Options
from bench._peers import PAYLOAD, call, prepare
from bench._queue_work import NAME
from bench._report import Report, Steps
from bench._stats import Line, compare, median

DELAYED, IN_FLIGHT = 200_000, 50_000
KEYS, FREE = 10_000, 10
BATCHES = (1, 10)
TARGET_BACKGROUND, TARGET_KEYS = 1.3, 2.0
_CPU = "CPU of receive + ack"
_WARM_UP = 0.1
# A read that brings less than was sent is repeated, at the cost of its time.
_PATIENCE = 100
# Every place is a database of its own, so that nothing of one is in the indexes of another.
PLACES = (
    *((system, kind) for kind in ("empty", "behind") for system in _queue_work.SYSTEMS),
    ("postbus", "keys"),
)

_DELAYED = {
    "pgmq": "pgmq.send_batch('bench', array_fill('{payload}'::jsonb, array[1000]), 3600)",
    "postbus": "postbus.send_batch('bench', array_fill('{payload}'::text, array[1000]), delay => '1 hour')",
}
_CLAIM = {
    "pgmq": "select count(*) from pgmq.read('bench', 3600, 10000)",
    "postbus": "select count(*) from postbus.receive('bench', 10000, '1 hour')",
}
_KEYED = """
select postbus.send_batch('bench', array_fill('{payload}'::text, array[{n}]),
  keys => array(select 'key' || i from generate_series(1, {n}) i))"""
_SEND = {
    "pgmq": b"select * from pgmq.send_batch('bench', $1::jsonb[])",
    "postbus": b"select postbus.send_batch('bench', $1::text[], keys => $2::text[])",
}

Times = dict[str, list[float]]


def run(db: Database, options: Options, steps: Steps) -> Report:
    """Fill the backgrounds, then let all places take turns."""
    scale = options.scale
    report = Report(
        "Queues with a background",
        {
            **db.settings,
            "synchronous_commit": "off",
            "consumers": "1",
            "behind": f"{DELAYED:,} delayed and {IN_FLIGHT:,} in flight",
            "keys": f"{KEYS:,} of concurrency 1; {KEYS - FREE:,} have one message in flight and one waiting",
            "payload": f"{len(PAYLOAD)} bytes",
            "rounds": str(scale.rounds),
            "seconds a turn": f"{scale.background:g}",
            "client": "libpq, prepared, text results; no ANALYZE",
        },
    )
    steps.begin("queue background", len(PLACES) + scale.rounds * len(PLACES) * len(BATCHES))
    found: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
    repeated: dict[tuple[str, str], float] = defaultdict(float)
    with ExitStack() as stack:
        turns: dict[tuple[str, str], Callable[[int, float], Times]] = {}
        for system, kind in PLACES:
            with steps.step(f"background: {system}, {kind}"):
                conn = stack.enter_context(_copy(db, f"{system}_{kind}"))
                _prepare(conn, system, kind)
                turns[system, kind] = _turns(conn, system, kind)
        for number in range(scale.rounds):
            for batch in BATCHES:
                for (system, kind), turn in turns.items():
                    with steps.step(f"batch {batch}: {system}, {kind}, round {number + 1}"):
                        times = turn(batch, scale.background)
                    repeated[system, kind] += sum(times.pop("repeated"))
                    for what, values in times.items():
                        found[system, kind, batch, what].append(median(values))
    for batch in BATCHES:
        for what in sorted({what for *_, what in found}, key=str.casefold, reverse=True):
            report.lines += _lines(what, batch, {place: found[*place, batch, what] for place in PLACES})
    again = ", ".join(f"{system} {kind} {n:.0f}" for (system, kind), n in repeated.items() if n)
    report.notes.append(f"- Reads that brought less than was there and were repeated: {again or 'none'}.")
    report.details["medians in ms"] = {", ".join(map(str, place)): values for place, values in found.items()}
    return report


def _lines(what: str, batch: int, found: dict[tuple[str, str], list[float]]) -> list[Line]:
    # case, measured, beside, name of the latter, target
    pairs: tuple[tuple[str, tuple[str, str], tuple[str, str], str, float | None], ...] = (
        ("background: postbus", ("postbus", "behind"), ("postbus", "empty"), "empty", TARGET_BACKGROUND),
        ("background: pgmq", ("pgmq", "behind"), ("pgmq", "empty"), "empty", None),
        ("background", ("postbus", "behind"), ("pgmq", "behind"), "pgmq", None),
        ("blocked keys: postbus", ("postbus", "keys"), ("postbus", "empty"), "plain", TARGET_KEYS),
    )
    if what == _CPU:
        pairs = tuple((*pair[:-1], None) for pair in pairs)
    return [
        compare(
            f"{what}, batch {batch}, {case}",
            found[ours],
            found[theirs],
            "ms",
            target,
            at_most=True,
            beside=beside,
        )
        for case, ours, theirs, beside, target in pairs
    ]


@contextmanager
def _copy(db: Database, name: str) -> Iterator[Connection]:
    """Connect to a database of its own, with both systems, on the same server."""
    here = conninfo_to_dict(db.dsn)["dbname"]
    name = f"postbus_bench_{os.getpid()}_{name}"
    with psycopg.connect(db.dsn, autocommit=True, dbname="postgres") as admin:
        create = sql.SQL("create database {} template {}")
        admin.execute(create.format(sql.Identifier(name), sql.Identifier(str(here))))
        copy = Database(make_conninfo(db.dsn, dbname=name), db.settings)
        try:
            with copy.connect() as conn:
                yield conn
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _prepare(conn: Connection, system: str, kind: str) -> None:
    _queue_work.create(conn, system)
    if kind == "behind":
        send = _DELAYED[system].format(payload=PAYLOAD)
        block = f"do $$ begin for i in 1 .. {DELAYED // 1000} loop perform {send}; commit; end loop; end $$"
        conn.execute(block.encode())
        _queue_work.fill(conn, system, IN_FLIGHT)
        _claim(conn, system, IN_FLIGHT)
    elif kind == "keys":
        conn.execute("select postbus.set_key_policy(%s, concurrency => 1)", [NAME])
        for _ in range(2):
            conn.execute(_KEYED.format(payload=PAYLOAD, n=KEYS - FREE).encode())
        _claim(conn, system, KEYS - FREE)


def _claim(conn: Connection, system: str, wanted: int) -> None:
    taken = 0
    while taken < wanted:
        row = conn.execute(_CLAIM[system].encode()).fetchone()
        assert row is not None
        if not row[0]:
            raise RuntimeError(f"{system} handed out {taken} of {wanted} messages")
        taken += row[0]


def _turns(conn: Connection, system: str, kind: str) -> Callable[[int, float], Times]:
    """For so long: send what one call takes, take it, finish it."""
    reader = _queue_work.reader(conn, system)
    prepare(conn.pgconn, b"send", _SEND[system])
    element = '"' + PAYLOAD.replace('"', '\\"') + '"'

    def turn(batch: int, seconds: float) -> Times:
        params = [b"{%s}" % b",".join([element.encode()] * batch)]
        if system == "postbus":
            # The free keys in turn; without a key policy they are only data.
            params.append(b"{%s}" % b",".join(b"free%d" % (i % FREE) for i in range(batch)))
        times: Times = defaultdict(list)
        start = time.perf_counter()
        while (now := time.perf_counter()) < start + _WARM_UP + seconds:
            warm = now > start + _WARM_UP
            call(conn.pgconn, b"send", params)
            cpu = _cpu.of_connection(conn)
            t0 = time.perf_counter()
            pages = [reader.read(batch)]
            while (missing := batch - sum(len(page.payloads) for page in pages)) and len(pages) < _PATIENCE:
                pages.append(reader.read(missing))
            t1 = time.perf_counter()
            for page in pages:
                reader.finish(page)
            t2 = time.perf_counter()
            if missing:
                raise RuntimeError(f"{system}, {kind}: {batch - missing} of {batch} messages")
            times["repeated"].append(len(pages) - 1)
            if warm:
                times["receive"].append((t1 - t0) * 1000)
                times["receive + ack"].append((t2 - t0) * 1000)
                after = _cpu.of_connection(conn)
                if cpu is not None and after is not None:
                    times[_CPU].append((after - cpu) * 1000)
        return times

    return turn


if __name__ == "__main__":
    single("Receive in front of a large background.", run, seconds="background")
