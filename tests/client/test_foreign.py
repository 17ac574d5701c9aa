"""Statements on the caller's own connection: his transaction, the same values, the same errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import django.db
import psycopg
import pytest
import sqlalchemy
from django.db import connections, transaction
from django.db.utils import ConnectionHandler
from sqlalchemy import orm

from postbus.client import _foreign
from postbus.client._foreign import fetch, fetch_async
from postbus.errors import BadArgument, LeaseLost, NotFound, PostbusError
from tests.client import callers
from tests.client.callers import Caller
from tests.conftest import Database, _fresh

SEND = "select postbus.send(%s::text, %s::text, headers => %s::jsonb)"
SEND_BLOB = "select postbus.send(%s::text, %s::bytea)"
RECEIVE = (
    "select id, type, key, payload, blob, headers, created_at, attempt, receipt, state "
    "from postbus.receive(%s::text, %s::int)"
)


@pytest.fixture(scope="module")
def database(server_dsn: str, template: str) -> Iterator[Database]:
    """One for all tests here; each has a queue of its own."""
    with contextmanager(_fresh)(server_dsn, template) as made:
        yield made


@pytest.fixture
def queue(database: Database) -> Iterator[Database]:
    database.connect().execute("select postbus.create_queue('q')")
    _foreign._shapes.clear()  # so that each caller finds out for himself
    yield database
    database.connect().execute("select postbus.drop_queue('q', true)")
    database.close()


@pytest.fixture(params=[*callers.SYNC, *callers.ASYNC], ids=lambda made: made.__name__)
def caller(request: pytest.FixtureRequest, queue: Database) -> Iterator[Caller]:
    made: Caller = request.param(queue.dsn)
    yield made
    made.close()


def ready(db: Database) -> Any:
    row = db.connect().execute("select ready from postbus.list_queues()").fetchone()
    assert row
    return row[0]


def test_a_commit_of_the_caller_makes_it_seen(caller: Caller, queue: Database) -> None:
    [(id_,)] = caller.fetch(SEND, "q", "hello", None)
    assert type(id_) is int
    assert ready(queue) == 0
    caller.commit()
    assert ready(queue) == 1


def test_a_rollback_of_the_caller_leaves_nothing(caller: Caller, queue: Database) -> None:
    caller.own("create table orders (id int)")
    caller.fetch(SEND, "q", "hello", None)
    caller.fetch(RECEIVE, "q", 10)
    caller.rollback()
    assert ready(queue) == 0
    rows = queue.connect().execute("select to_regclass('orders')").fetchone()
    assert rows == (None,)


def test_it_is_the_transaction_of_the_caller(caller: Caller, queue: Database) -> None:
    caller.own("create table orders as select pg_current_xact_id()::text as xid")
    [(one, two)] = caller.fetch("select xid, pg_current_xact_id()::text from orders")
    assert one == two


def test_messages_come_as_plain_tuples(caller: Caller, queue: Database) -> None:
    headers = '{"a": [1, null, "x"], "text": "{}"}'
    [(first,)] = caller.fetch(SEND, "q", '{"json": "stays text"}', headers)
    [(second,)] = caller.fetch(SEND_BLOB, "q", b"\x00\xff")
    rows = caller.fetch(RECEIVE, "q", 10)
    assert [type(row) for row in rows] == [tuple, tuple]
    one, two = rows
    assert one[:6] == (
        first, "default", None, '{"json": "stays text"}', None, {"a": [1, None, "x"], "text": "{}"},
    )  # fmt: skip
    assert two[:6] == (second, "default", None, None, b"\x00\xff", None)
    assert [type(value) for value in two] == [
        int, str, type(None), type(None), bytes, type(None), datetime, int, str, type(None)
    ]  # fmt: skip
    assert two[6].utcoffset() is not None
    assert abs(two[6] - datetime.now(UTC)) < timedelta(minutes=1)
    caller.commit()
    assert caller.fetch("select postbus.ack(%s::text[])", [one[8], two[8]]) == [(2,)]


def test_every_type_goes_both_ways(caller: Caller) -> None:
    at = datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=UTC)
    casts = (
        "text", "text[]", "text[]", "text[]", "jsonb", "jsonb", "jsonb", "float8", "float8", "int", "bigint",
        "bool", "timestamptz", "timestamptz", "bytea", "bytea[]", "text",
    )  # fmt: skip
    values: tuple[Any, ...] = (
        "quo'te % \\ ü", ["a", None, 'b"{,}'], [], [None], '"a"', "null", '{"n": 1}', 1.5, 2, 3, 2**40, True,
        at, None, b"\x00'\\", [b"\x00\xff", None], None,
    )  # fmt: skip
    query = f"select {', '.join(f'%s::{cast}' for cast in casts)}"
    [row] = caller.fetch(query, *values)
    expected: tuple[Any, ...] = (
        "quo'te % \\ ü", ["a", None, 'b"{,}'], [], [None], "a", None, {"n": 1}, 1.5, 2.0, 3, 2**40, True,
        at, None, b"\x00'\\",
    )  # fmt: skip
    assert row[:15] == expected
    assert [type(value) for value in row[:15]] == [type(value) for value in expected]
    assert [None if item is None else bytes(item) for item in row[15]] == [b"\x00\xff", None]
    assert row[16] is None


def test_batches_with_headers(caller: Caller) -> None:
    query = "select postbus.send_batch(%s::text, %s::text[], %s::text[], %s::text[], %s::jsonb[])"
    many = caller.fetch(query, "q", ["one", "two"], None, ["k", None], ['{"n": 1}', None])
    [(ids,)] = many
    assert isinstance(ids, list)
    rows = caller.fetch(RECEIVE, "q", 10)
    assert [(row[0], row[2], row[3], row[5]) for row in rows] == [
        (ids[0], "k", "one", {"n": 1}),
        (ids[1], None, "two", None),
    ]
    blobs = "select postbus.send_batch(%s::text, %s::bytea[])"
    [(ids,)] = caller.fetch(blobs, "q", [b"\x00", b"x"])
    assert [row[4] for row in caller.fetch(RECEIVE, "q", 10)] == [b"\x00", b"x"]


def test_asking_for_the_columns_runs_nothing(caller: Caller) -> None:
    """A claim happens once also when its statement is seen for the first time."""
    caller.fetch(SEND, "q", "hello", None)
    _foreign._shapes.clear()
    [row] = caller.fetch(RECEIVE, "q", 10)
    assert row[7] == 1


@pytest.mark.parametrize(
    ("query", "params", "expected"),
    [
        (SEND, ("nowhere", "x", None), NotFound),
        ("select postbus.create_queue(%s::text, %s::jsonb)", ("odd", '{"colour": 1}'), BadArgument),
    ],
)
def test_errors_of_the_engine_have_their_class(
    caller: Caller, query: str, params: tuple[object, ...], expected: Any
) -> None:
    with pytest.raises(expected) as caught:
        caller.fetch(query, *params)
    plain = caught.value
    assert plain.sqlstate.startswith("PB")
    assert plain.__cause__ is not None
    assert "SQL" not in plain.message
    assert "\n" not in plain.message
    caller.rollback()
    assert caller.fetch("select 1") == [(1,)]


def test_a_second_ack_is_late(caller: Caller) -> None:
    caller.fetch(SEND, "q", "x", None)
    [row] = caller.fetch(RECEIVE, "q", 1)
    caller.fetch("select postbus.ack(%s::text[])", [row[8]])
    with pytest.raises(LeaseLost):
        caller.fetch("select postbus.ack(%s::text[])", [row[8]])


def test_hints_come_along(caller: Caller, queue: Database) -> None:
    caller.own("select postbus.alter_queue('q', '{\"max_size\": 1}')")
    caller.fetch(SEND, "q", "x", None)
    with pytest.raises(PostbusError) as caught:
        caller.fetch(SEND, "q", "x", None)
    assert caught.value.message == "queue 'q' is full: 1 of 1 messages"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Try again")


OTHER_ERRORS: dict[str, type[Exception]] = {
    "Psycopg": psycopg.errors.DivisionByZero,
    "Async": psycopg.errors.DivisionByZero,
    "Sa": sqlalchemy.exc.DBAPIError,
    "Django": django.db.DataError,
    "Asyncpg": asyncpg.DivisionByZeroError,
    "Psycopg2": Exception,
}


def test_other_errors_are_those_of_the_framework(caller: Caller) -> None:
    name = type(caller).__name__
    longest = max((key for key in OTHER_ERRORS if name.startswith(key)), key=len)
    with pytest.raises(OTHER_ERRORS[longest]) as caught:
        caller.fetch("select 1 / %s::int", 0)
    assert not type(caught.value).__module__.startswith("postbus")


def opened(name: str, db: Database) -> Caller:
    made: Caller = getattr(callers, name)(db.dsn)
    return made


@pytest.mark.parametrize("name", ["Psycopg", "SaSession", "Django"])
def test_an_async_bus_refuses_connections_that_block(name: str, queue: Database) -> None:
    caller = opened(name, queue)
    try:
        with pytest.raises(BadArgument) as caught:
            asyncio.run(fetch_async(caller.conn, "select 1", ()))
    finally:
        caller.close()
    given = type(caller.conn)
    assert caught.value.message.startswith(f"conn is {given.__module__}.{given.__qualname__};")
    assert "AsyncConnection" in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Bus takes a psycopg Connection")


@pytest.mark.parametrize("name", ["AsyncPsycopg", "Asyncpg", "SaAsyncSession"])
def test_a_bus_refuses_async_connections(name: str, queue: Database) -> None:
    caller = opened(name, queue)
    try:
        with pytest.raises(BadArgument) as caught:
            fetch(caller.conn, "select 1", ())
    finally:
        caller.close()
    assert type(caller.conn).__qualname__ in caught.value.message
    assert "Django" in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("AsyncBus takes")


def test_anything_else_is_named_too() -> None:
    with pytest.raises(
        BadArgument, match=r"conn is builtins.str; it has to be a psycopg Connection"
    ) as caught:
        fetch("postgresql:///", "select 1", ())
    assert caught.value.hint is None


def test_other_databases_and_drivers_are_named() -> None:
    named = r"through sqlite\+pysqlite; .* psycopg, "
    with sqlalchemy.create_engine("sqlite://").connect() as conn, pytest.raises(BadArgument, match=named):
        fetch(conn, "select 1", ())
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    wrapper = ConnectionHandler({"default": sqlite})["default"]
    with pytest.raises(BadArgument, match="Django connection to SQLite"):
        fetch(wrapper, "select 1", ())


def test_in_autocommit_each_statement_is_a_transaction(queue: Database) -> None:
    fetch(queue.connect(autocommit=True), SEND, ("q", "x", None))
    assert ready(queue) == 1


def test_sqlalchemy_in_autocommit(queue: Database) -> None:
    caller = opened("SaConnection", queue)
    caller.conn.execution_options(isolation_level="AUTOCOMMIT")
    caller.fetch(SEND, "q", "x", None)
    caller.close()
    assert ready(queue) == 1


def test_blocks_of_sqlalchemy(queue: Database) -> None:
    engine = callers.sa_engine("psycopg", callers.parts_of(queue.dsn))
    with orm.Session(engine) as session, session.begin():
        fetch(session, SEND, ("q", "kept", None))
        with session.begin_nested() as inner:
            fetch(session, SEND, ("q", "undone", None))
            inner.rollback()
    assert ready(queue) == 1


def test_atomic_blocks_of_django(queue: Database) -> None:
    connections["orders"] = callers.django_handler(callers.parts_of(queue.dsn))["default"]
    conn = connections["orders"]
    try:
        with transaction.atomic(using="orders"):
            fetch(conn, SEND, ("q", "kept", None))
            with pytest.raises(NotFound), transaction.atomic(using="orders"):
                fetch(conn, "select postbus.send(%s::text, 'x'), postbus.send('nowhere', 'x')", ("q",))
            assert ready(queue) == 0
        assert ready(queue) == 1
        with transaction.atomic(using="orders"):
            transaction.set_rollback(True, using="orders")
            with pytest.raises(transaction.TransactionManagementError):
                fetch(conn, "select 1", ())
    finally:
        conn.close()
        del connections["orders"]


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys, postbus.client._foreign;"
        "print({'sqlalchemy', 'django', 'asyncpg', 'psycopg2'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
