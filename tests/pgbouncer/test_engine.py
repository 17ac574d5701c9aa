"""The engine when sessions are shared: PgBouncer gives each transaction to any session of its pool.

Clients do without prepared statements (``prepare_threshold=None``), which older poolers do not know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from postbus.client._foreign import fetch_async
from postbus.errors import LeaseLost, QueueFull, translated
from tests.conftest import Database
from tests.pgbouncer.pooler import POOL_SIZE, Pooler

Connection = psycopg.Connection[Any]


def clients(pooled: Database, count: int) -> list[Connection]:
    return [pooled.connect(prepare_threshold=None) for _ in range(count)]


def rows(conn: Connection, query: str, *params: object) -> list[Any]:
    with translated():
        return conn.execute(query.encode(), params).fetchall()


def value(conn: Connection, query: str, *params: object) -> Any:
    [(result,)] = rows(conn, query, *params)
    return result


def send(conn: Connection, payload: str, key: str | None = None) -> int:
    return int(value(conn, "select postbus.send('q', %s::text, key => %s::text)", payload, key))


def receive(conn: Connection, max: int = 1) -> list[tuple[str, str]]:
    """Payloads and receipts."""
    return rows(conn, "select payload, receipt from postbus.receive('q', %s::int)", max)


def ack(conn: Connection, *receipts: str) -> int:
    return int(value(conn, "select postbus.ack(%s::text[])", list(receipts)))


def until(look: Callable[[], list[Any]], seconds: float = 10) -> list[Any]:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.02)
    return found


def test_sessions_are_shared(pooled: Database, pgbouncer: Pooler) -> None:
    """What the other tests here rest on."""
    pids = {value(conn, "select pg_backend_pid()") for conn in clients(pooled, 6)}
    assert len(pids) <= POOL_SIZE
    first, second = clients(pooled, 2)
    with first.transaction(), second.transaction():
        assert value(first, "select pg_backend_pid()") != value(second, "select pg_backend_pid()")
    [pool] = [pool for pool in pgbouncer.ask("show pools") if pool["database"] == pooled.name]
    assert pool["pool_mode"] == "transaction"


def test_queue_clients_take_turns(pooled: Database) -> None:
    """Each step of a message is done by another client, in another session."""
    desks = clients(pooled, 6)
    value(desks[0], "select postbus.create_queue('q')")
    for i in range(30):
        send(desks[i % 6], f"m{i}")
    got: list[str] = []
    for i in range(10):
        work = receive(desks[i % 6], 3)
        assert ack(desks[(i + 1) % 6], *(receipt for _, receipt in work)) == 3
        got += [payload for payload, _ in work]
    assert got == [f"m{i}" for i in range(30)]
    assert receive(desks[3]) == []


def test_queue_clients_at_the_same_time(pooled: Database) -> None:
    desks = clients(pooled, 6)
    value(desks[0], "select postbus.create_queue('q')")
    start = Barrier(6)

    def work(number: int) -> list[str]:
        conn = desks[number]
        done: list[str] = []
        start.wait(30)
        for i in range(20):
            send(conn, f"{number}:{i}")
            taken = receive(conn, 2)
            if taken:
                ack(conn, *(receipt for _, receipt in taken))
                done += [payload for payload, _ in taken]
        return done

    with ThreadPoolExecutor(6) as threads:
        done = [payload for part in threads.map(work, range(6)) for payload in part]
    while rest := receive(desks[0], 100):
        ack(desks[1], *(receipt for _, receipt in rest))
        done += [payload for payload, _ in rest]
    assert sorted(done) == sorted(f"{n}:{i}" for n in range(6) for i in range(20))


def test_a_receipt_is_good_in_any_session_and_only_once(pooled: Database) -> None:
    one, two = clients(pooled, 2)
    value(one, "select postbus.create_queue('q')")
    send(one, "x")
    [(_, receipt)] = receive(one)
    with two.transaction():  # so that the next call of `one` is in another session
        value(two, "select 1")
        assert ack(one, receipt) == 1
    with pytest.raises(LeaseLost):
        ack(two, receipt)


def test_a_group_is_read_by_clients_in_turn(pooled: Database) -> None:
    desks = clients(pooled, 4)
    value(desks[0], "select postbus.create_stream('events')")
    value(desks[0], "select postbus.create_group('events', 'g', '{\"ordering\": \"stream\"}')")
    got: list[str] = []
    for i in range(12):
        publisher, reader, finisher = desks[i % 4], desks[(i + 1) % 4], desks[(i + 2) % 4]
        value(publisher, "select postbus.publish('events', %s::text)", f"e{i}")
        page = rows(reader, "select payload, receipt from postbus.consume('events', 'g', 5)")
        assert ack(finisher, *(receipt for _, receipt in page)) == len(page)
        got += [payload for payload, _ in page]
    assert got == [f"e{i}" for i in range(12)]


def test_what_one_client_learnt_of_a_queue_does_not_hide_messages_of_another(pooled: Database) -> None:
    """How long a read of the whole queue takes is kept in a setting of the session (postbus.whole_...)."""
    one, two, late = clients(pooled, 3)
    value(one, "select postbus.create_queue('q')")
    with late.transaction():  # holds one session; the two others share what is left
        send(late, "late")
        for i in range(50):
            send(one, f"m{i}")
            [(payload, receipt)] = receive(two)
            assert payload == f"m{i}"
            ack(one, receipt)
        assert receive(one, 10) == []
    [(payload, receipt)] = until(lambda: receive(two))
    assert payload == "late"
    assert ack(one, receipt) == 1


def test_hints_do_not_outlive_their_queue(pooled: Database) -> None:
    one, two = clients(pooled, 2)
    for turn in range(3):
        value(one, "select postbus.create_queue('q', '{\"max_size\": 100}')")
        value(two, "select postbus.set_key_policy('q', null, concurrency => 1)")
        send(one, f"{turn}a", "k")
        send(two, f"{turn}b", "k")
        [(payload, receipt)] = until(lambda: receive(two, 10))
        assert payload == f"{turn}a"
        ack(one, receipt)
        [(payload, _)] = until(lambda: receive(one, 10))
        assert payload == f"{turn}b"
        value(two, "select postbus.drop_queue('q', true)")


def test_the_bound_of_a_queue_holds_in_all_sessions(pooled: Database) -> None:
    """How much room there is, is kept in a setting of the session (postbus.room_...)."""
    one, two = clients(pooled, 2)
    value(one, "select postbus.create_queue('q', '{\"max_size\": 10}')")
    for _ in range(4):
        send(one, "x")
        with one.transaction():
            value(one, "select 1")
            send(two, "x")  # in the other session
    send(one, "x")
    send(two, "x")
    for conn in (one, two):
        with pytest.raises(QueueFull):
            send(conn, "x")
    with one.transaction():
        value(one, "select 1")
        with pytest.raises(QueueFull):
            send(two, "x")
    [(_, receipt)] = receive(two)
    ack(one, receipt)
    assert send(two, "x") > 0


def test_keys_keep_their_limit_in_all_sessions(pooled: Database) -> None:
    """Which keys can be served is kept in a setting of the session too (postbus.keys_...)."""
    desks = clients(pooled, 4)
    value(desks[0], "select postbus.create_queue('q')")
    value(desks[0], "select postbus.set_key_policy('q', null, concurrency => 1)")
    for i in range(12):
        send(desks[i % 4], f"{i}", f"k{i % 3}")
    done: list[int] = []
    while len(done) < 12:
        taken = until(lambda: [work for conn in desks for work in receive(conn, 10)])
        assert len(taken) <= 3, "more than one of a key"
        done += [int(payload) for payload, _ in taken]
        assert ack(desks[len(done) % 4], *(receipt for _, receipt in taken)) == len(taken)
    assert [[i for i in done if i % 3 == key] for key in range(3)] == [
        [k, k + 3, k + 6, k + 9] for k in range(3)
    ]


def test_listen_does_not_arrive(db: Database, pooled: Database) -> None:
    """Why the client asks at its start whether it hears itself, and polls where it does not."""
    [through] = clients(pooled, 1)
    direct = db.connect()
    direct.execute("select postbus.create_queue('q')")
    for conn in (direct, through):
        conn.execute('listen "postbus.q"')
    send(db.connect(), "x")
    assert [note.channel for note in direct.notifies(timeout=10, stop_after=1)] == ["postbus.q"]
    assert list(through.notifies(timeout=0.3, stop_after=1)) == []
    # Nor does it say that it does not listen: the statement was taken without a word.
    assert [payload for payload, _ in receive(through)] == ["x"]


def test_asyncpg_through_the_pooler(pooled: Database) -> None:
    """Without its cache of statements, as its documentation wants it before PgBouncer."""
    parts = conninfo_to_dict(pooled.dsn)

    async def work() -> list[tuple[Any, ...]]:
        connections = [
            await asyncpg.connect(
                host=parts["host"], port=parts["port"], user=parts["user"], database=parts["dbname"],
                statement_cache_size=0, ssl=False,
            )
            for _ in range(4)
        ]  # fmt: skip
        one, two, *_ = connections
        try:
            await fetch_async(one, "select postbus.create_queue(%s::text)", ("q",))
            async with one.transaction():
                await fetch_async(
                    one,
                    "select postbus.send(%s::text, %s::text, headers => %s::jsonb)",
                    ("q", "x", '{"n": 1}'),
                )
                assert await fetch_async(two, "select payload from postbus.receive(%s::text)", ("q",)) == []
            query = "select payload, headers from postbus.receive(%s::text)"
            return [row for conn in connections for row in await fetch_async(conn, query, ("q",))]
        finally:
            for conn in connections:
                await conn.close()

    assert asyncio.run(work()) == [("x", {"n": 1})]
