"""A backlog for one consumer, and the consumer that works it off, from a client or inside the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench import _cpu
from bench._database import Connection
from bench._peers import PAYLOAD, Pgmq, Postbus, Reader, create_stream

PAGES = (100, 10)
SIDES = ("client", "server")
ORDERINGS = ("key", "none")
_CHUNK = 1000
# A worker keeps its connection: functions are compiled and plans are made before the clock starts.
_WARM_UP = 0.05

_FILL_PGMQ = """
do $$ begin
  for i in 1 .. {chunks} loop
    perform pgmq.send_batch('{name}', array_fill('{payload}'::jsonb, array[{chunk}]));
    commit;
  end loop;
end $$"""
_FILL_POSTBUS = """
do $$ begin
  for i in 1 .. {chunks} loop
    perform postbus.publish_batch('{name}', array_fill('{payload}'::text, array[{chunk}]));
    commit;
  end loop;
end $$"""

# The same loop inside the server: what the calls cost without a client. A setting brings the count back.
_DRAIN_PGMQ = """
do $$
declare
  v_end timestamptz := clock_timestamp() + interval '{seconds} s';
  v_ids bigint[];
  v_count bigint := 0;
begin
  loop
    select array_agg(m.msg_id) into v_ids from pgmq.read('{name}', 30, {page}) m;
    commit;
    exit when v_ids is null;
    perform pgmq.delete('{name}', v_ids);
    commit;
    v_count := v_count + cardinality(v_ids);
    exit when clock_timestamp() >= v_end;
  end loop;
  perform set_config('bench.count', v_count::text, false);
end $$"""
_DRAIN_POSTBUS = """
do $$
declare
  v_end timestamptz := clock_timestamp() + interval '{seconds} s';
  v_batch text;
  v_n bigint;
  v_count bigint := 0;
begin
  loop
    select min(m.batch), count(m.id) into v_batch, v_n from postbus.consume('{name}', '{group}', {page}) m;
    commit;
    exit when v_n = 0;
    perform postbus.ack(v_batch);
    commit;
    v_count := v_count + v_n;
    exit when clock_timestamp() >= v_end;
  end loop;
  perform set_config('bench.count', v_count::text, false);
end $$"""


@dataclass(frozen=True)
class Rate:
    """Events per second, and per second of the server's CPU time where that can be seen."""

    wall: float
    cpu: float | None


def fill(conn: Connection, name: str, backlog: int) -> None:
    """Make a backlog of each system's own for every turn; groups share the stream, queues cannot."""
    numbers = {"chunks": backlog // _CHUNK, "chunk": _CHUNK, "payload": PAYLOAD}
    create_stream(conn, name)
    for suffix in _suffixes():
        for ordering in ORDERINGS:
            conn.execute(
                "select postbus.create_group(%s, %s, jsonb_build_object('ordering', %s::text))",
                [name, f"{ordering}_{suffix}", ordering],
            )
        queue = f"{name}_{suffix}"
        conn.execute("select pgmq.create(%s)", [queue])
        conn.execute(_FILL_PGMQ.format(name=queue, **numbers).encode())
    conn.execute(_FILL_POSTBUS.format(name=name, **numbers).encode())
    conn.execute("vacuum analyze")


def empty(conn: Connection, name: str) -> None:
    """Remove what is left."""
    for suffix in _suffixes():
        conn.execute("select pgmq.drop_queue(%s)", [f"{name}_{suffix}"])
    conn.execute("select postbus.drop_stream(%s, force => true)", [name])
    conn.execute("select * from postbus.maintain()")


def _suffixes() -> list[str]:
    return [f"{page}_{side}" for page in PAGES for side in SIDES]


def drain(conn: Connection, name: str, system: str, *, side: str, page: int, seconds: float) -> Rate:
    """Work the backlog off for so long. The system is pgmq, or an ordering of Postbus."""
    work = (_client if side == "client" else _server)(conn, name, system, page)
    work(_WARM_UP)
    cpu, start = _cpu.of_connection(conn), time.perf_counter()
    count = work(seconds)
    took, after = time.perf_counter() - start, _cpu.of_connection(conn)
    return Rate(count / took, None if cpu is None or after is None else count / (after - cpu))


def _client(conn: Connection, name: str, system: str, page: int) -> Callable[[float], int]:
    reader: Reader
    if system == "pgmq":
        reader = Pgmq(conn, f"{name}_{page}_client")
    else:
        reader = Postbus(conn, name, f"{system}_{page}_client")

    def work(seconds: float) -> int:
        end = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end:
            taken = reader.read(page)
            if not taken.payloads:
                break
            reader.finish(taken)
            count += len(taken.payloads)
        return count

    return work


def _server(conn: Connection, name: str, system: str, page: int) -> Callable[[float], int]:
    def work(seconds: float) -> int:
        if system == "pgmq":
            loop = _DRAIN_PGMQ.format(name=f"{name}_{page}_server", page=page, seconds=seconds)
        else:
            group = f"{system}_{page}_server"
            loop = _DRAIN_POSTBUS.format(name=name, group=group, page=page, seconds=seconds)
        conn.execute(loop.encode())
        row = conn.execute("select current_setting('bench.count')").fetchone()
        assert row is not None
        return int(row[0])

    return work
