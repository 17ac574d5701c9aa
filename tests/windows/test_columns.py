"""Windows by columns: the same events as by rows, whatever they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from postbus import engine
from tests.engine.bus import Bus, Session, refused
from tests.windows.reading import Connection, by_columns, plan, position, read

pa = pytest.importorskip("pyarrow")

ALL = ["id", "tick", "lane", "type", "key", "payload", "blob", "headers", "at"]


def table(c: Connection, part: str, chunk: int = 4096, size: int = 2**19, **more: Any) -> Any:
    """As the Spark source reads it."""
    from postbus.spark import _columns

    options = "".join(f", {name} => %({name})s::text[]" for name in more)
    cur = c.execute(
        f"select * from postbus.read_columns('s', %(part)s, chunk => %(chunk)s{options})",
        {"part": part, "chunk": chunk, **more},
        binary=True,
    )
    wanted = more.get("columns", ALL)
    found = list(_columns.tables(cur, wanted, size))
    return pa.concat_tables(found) if found else pa.table({name: [] for name in wanted})


def rows(c: Connection, part: str, more: str = "") -> list[tuple[Any, ...]]:
    return c.execute(
        "select id, tick, lane, type, key, payload, blob, headers::text, at"
        f" from postbus.read_window('s', %s{more})",
        [part],
    ).fetchall()


def tuples(found: Any) -> list[tuple[Any, ...]]:
    return list(zip(*(found[name].to_pylist() for name in found.column_names), strict=True))


def some_of_everything(s: Session) -> None:
    s.rows("select postbus.publish_batch('s', array['a', '', 'häß€', repeat('x', 20000)])")
    s.rows("select postbus.publish('s', '\\x00ff'::bytea, 'blob')")
    s.rows("select postbus.publish('s', 'with', 'typed', 'key ü', '{\"h\": [1, \"ä\"]}')")
    s.rows("select postbus.publish('s', ''::bytea, key => '')")


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_value(bus: Bus, s: Session, lanes: int) -> None:
    s.stream(lanes=lanes)
    late = bus.session()
    late.begin()
    some_of_everything(late)
    some_of_everything(s)
    first = position(s.conn, "earliest")
    middle = position(s.conn, holder="me")
    some_of_everything(s)
    late.commit()
    until = position(s.conn, holder="me")
    total = 0
    for since, to in ((first, middle), (middle, until)):
        for part, _ in plan(s.conn, since, to, 2):
            expected = rows(s.conn, part)
            total += len(expected)
            for chunk, size in ((1, 0), (1, 2**19), (2, 100), (4096, 0)):
                assert tuples(table(s.conn, part, chunk, size)) == expected
            assert table(s.conn, part, columns=["payload"]).column_names == ["payload"]
            assert tuples(table(s.conn, part, types=["blob", "typed"], keys=["key ü"])) == rows(
                s.conn, part, ", types => '{blob,typed}', keys => '{key ü}'"
            )
    assert total == 21


def test_bad_arguments(s: Session) -> None:
    s.stream()
    first = position(s.conn, "earliest")
    s.fill(1)
    ((part, _),) = plan(s.conn, first, position(s.conn))
    with refused("PB003", "no column 'colour'"):
        table(s.conn, part, columns=["id", "colour"])
    with refused("PB003", "a chunk of 1 to"):
        table(s.conn, part, chunk=0)
    with refused("PB003", "not a part"):
        table(s.conn, "{}")
    assert table(s.conn, part, types=["nothing"]).num_rows == 0


def test_large_ids(s: Session) -> None:
    """Ids of more than 32 bits, also where blobs and headers name them."""
    s.stream()
    first = position(s.conn, "earliest")
    s.rows("select setval(id_seq, 12345678901) from postbus.stream")
    some_of_everything(s)
    parts = plan(s.conn, first, position(s.conn))
    assert [t for p, _ in parts for t in tuples(table(s.conn, p))] == [
        t for p, _ in parts for t in rows(s.conn, p)
    ]


@contextmanager
def latin1(server_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        name = sql.Identifier("postbus_latin1")
        admin.execute(
            sql.SQL("create database {} encoding 'LATIN1' locale 'C' template template0").format(name)
        )
        try:
            with psycopg.connect(make_conninfo(server_dsn, dbname="postbus_latin1"), autocommit=True) as c:
                engine.install(c)
                yield c
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(name))


def test_a_database_of_another_encoding(server_dsn: str) -> None:
    with latin1(server_dsn) as c:
        c.execute("set client_encoding to utf8")
        c.execute("select postbus.create_stream('s')")
        first = position(c, "earliest")
        c.execute("select postbus.publish('s', 'häß', 'ä', 'é', '{\"h\": \"ü\"}')")
        c.execute("select postbus.publish('s', 'plain')")
        ((part, _),) = plan(c, first, position(c))
        assert tuples(table(c, part)) == rows(c, part)
        assert [p for _, p in by_columns(c, part)] == [p for _, p in read(c, part)] == ["häß", "plain"]
        assert re.search("ü", tuples(table(c, part))[0][7])
