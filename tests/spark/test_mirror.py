"""Mirrors: a captured table and its lake table hold the same rows."""

from __future__ import annotations

import json
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from postbus.cli import app
from postbus.errors import AlreadyExists, BadArgument, NotFound
from postbus.pipelines import mirror
from tests.spark.lake import Bench
from tests.spark.mirrors import STREAM, Lake
from tests.stress.sessions import value

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def lake(bench: Bench, tmp_path: Path) -> Lake:
    return Lake(bench, tmp_path / "lake")


def test_a_table_and_its_changes(lake: Lake) -> None:
    """Rows that were there, changes of all kinds, several tables in one stream, batches that end anywhere."""
    lake.sql(
        "create table t (id int primary key deferrable, a text)",
        "create table other (id int primary key, a text)",
        "insert into t select g, 'old ' || g from generate_series(1, 40) g",
    )
    lake.capture("t", "other")
    run = lake.mirror()
    assert (run.state, run.kind, run.pipeline, run.rows) == ("done", "mirror", "t", 40)
    lake.check()
    lake.sql(
        "insert into other select g, 'not ours' from generate_series(1, 30) g",
        "update t set a = 'new' where id <= 5",
        "update t set id = 30 - id where id between 1 and 29",  # keys are swapped
        "update t set id = id + 100 where id > 35",
        "delete from t where id = 30",
        "insert into t values (50, 'gone soon'), (51, 'stays')",
        "delete from t where id = 50",
        "truncate other",
    )
    run = lake.mirror(max_events=50)
    lake.check()
    assert run.until is not None
    assert lake.replayed(run.until[STREAM]) == lake.truth()
    # Three events each: batches of four divide them.
    lake.sql(
        "truncate t",
        "insert into t values (1, 'a'), (2, 'b')",
        "truncate t",
        "insert into t values (3, 'c'), (4, 'd')",
    )
    lake.mirror(max_events=4)
    lake.check()
    # And all in one.
    lake.sql("insert into t values (7, 'goes')", "truncate t", "insert into t values (3, 'stays')")
    lake.mirror()
    lake.check()
    assert lake.mirror().rows == 0
    version = lake.table().version()
    lake.sql("insert into other values (1, 'no change of t')")
    assert lake.mirror().rows == 0
    assert lake.table().version() == version, "nothing was written"
    stats = lake.c.execute("select state, runs, pending from postbus.pipeline_stats()").fetchone()
    assert stats == ("done", 6, 0)


LONG = "1234567890123456789012345678"
TYPES: list[tuple[str, str, Any]] = [
    # column, value in SQL, value in the lake
    ("b bool", "true", True),
    ("i2 smallint", "-32768", -32768),
    ("i4 int", "2147483647", 2147483647),
    ("i8 bigint", "-9223372036854775808", -(2**63)),
    ("r real", "0.1", pytest.approx(0.1)),
    ("d double precision", "0.1::float8 + 0.2", 0.1 + 0.2),
    ("dinf double precision", "'-Infinity'", float("-inf")),
    ("n numeric(38,10)", f"{LONG}.0123456789", Decimal(f"{LONG}.0123456789")),
    ("n0 numeric(5,-2)", "1234567", Decimal(1234600)),
    ("n1 numeric(2,4)", "0.0012", Decimal("0.0012")),
    ("nn numeric", "('1.10' || repeat('0', 50) || '7')::numeric", "1.10" + "0" * 50 + "7"),
    ("nnan numeric", "'NaN'", "NaN"),
    ("nbig numeric(60,2)", "1e50", "1" + "0" * 50 + ".00"),
    ("s text", "E'caf\u00e9 \"quoted\" \\\\ \\n\U0001f600'", 'caf\u00e9 "quoted" \\ \n\U0001f600'),
    ("v varchar(9)", "''", ""),
    ("c char(4)", "'ab'", "ab  "),
    ("u uuid", "'0195c0de-0000-7000-8000-000000000001'", "0195c0de-0000-7000-8000-000000000001"),
    ("j jsonb", """'{"b": 1.10, "a": [1, "x", null, true]}'""", '{"a": [1, "x", null, true], "b": 1.10}'),
    ("js jsonb", "'\"text\"'", '"text"'),
    ("ia int[]", "array[[1, 2], [3, null]]", "[[1, 2], [3, null]]"),
    ("ta text[]", "array['x', 'y z']", '["x", "y z"]'),
    ("ts timestamp", "'2026-01-31 12:34:56.789012'", datetime(2026, 1, 31, 12, 34, 56, 789012)),
    ("tz timestamptz", "'2026-01-31 12:00+02'", datetime(2026, 1, 31, 10, tzinfo=UTC)),
    ("dt date", "'0001-01-01'", date(1, 1, 1)),
    ("ti time", "'12:30'", "12:30:00"),
    ("iv interval", "'1 day 2 hours'", "1 day 02:00:00"),
    ("by bytea", r"'\x00ff10'", b"\x00\xff\x10"),
    ("e mood", "'happy'", "happy"),
    ("dm amount", "12.50", Decimal("12.50")),
    ("ip inet", "'10.0.0.1/8'", "10.0.0.1/8"),
    ("ra int4range", "'[1,5)'", "[1,5)"),
    ("g int generated always as (i4 - 1) stored", "default", 2147483646),
    ("nil int", "null", None),
]  # fmt: skip
RESCUED = [
    ("n2 numeric(5,2)", "'NaN'", '"n2": "NaN"'),
    ("ts2 timestamp", "'infinity'", '"ts2": "infinity"'),
    ("d2 date", "'0044-03-15 BC'", '"d2": "0044-03-15 BC"'),
    ("tz2 timestamptz", "'12345-01-01 00:00+00'", '"tz2": "12345-01-01T00:00:00+00:00"'),
]


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_every_type(lake: Lake, format: str) -> None:
    """By backfill, by an insert and by an update; what does not fit is kept all the same."""
    lake.sql("create type mood as enum ('happy')", "create domain amount as numeric(6,2)")
    columns = [*TYPES, *RESCUED]
    lake.c.execute(f"create table t (id int primary key, {', '.join(c for c, _, _ in columns)})".encode())
    values = ", ".join(v for _, v, _ in columns)
    lake.c.execute(f"insert into t values (1, {values})".encode())
    lake.capture("t")
    lake.c.execute(f"insert into t values (2, {values}), (3, {values})".encode())
    lake.sql("update t set v = 'x' where id = 3", "update t set v = '' where id = 3")
    lake.mirror(format=format)
    expected = {c.split()[0]: v for c, _, v in columns} | dict.fromkeys([c.split()[0] for c, _, _ in RESCUED])
    kept = "{" + ", ".join(text for _, _, text in RESCUED) + "}"
    rows = sorted(lake.table("t", format).read().to_pylist(), key=lambda r: int(r["id"]))
    for number, row in enumerate(rows, 1):
        assert row == {"id": number, **expected, "_rescued": kept}
    # A value that fits again leaves the rescue.
    lake.sql(
        "update t set n2 = 1.5, ts2 = null, d2 = null, tz2 = null where id = 1", "delete from t where id > 1"
    )
    lake.mirror(format=format)
    (row,) = lake.table("t", format).read().to_pylist()
    assert (row["n2"], row["_rescued"]) == (Decimal("1.50"), None)


def test_composite_keys_and_the_command_line(lake: Lake) -> None:
    lake.sql(
        'create table "Order lines" ("Order" bigint, sku text collate "C", at timestamptz,'
        ' price numeric(9,2), qty int, secret text, primary key (at, "Order", sku, price))',
        "insert into \"Order lines\" select g % 3, 'sku \"' || g, to_timestamp(g), g / 4.0, g, 'x'"
        " from generate_series(1, 20) g",
    )
    lake.sql("select postbus.capture('\"Order lines\"', 'cdc', columns => array['qty'])")
    lake.mirror('"Order lines"')
    lake.sql(
        'update "Order lines" set qty = -qty where qty > 10',
        'update "Order lines" set price = price + 1, "Order" = 7 where qty between 1 and 5',
        'delete from "Order lines" where qty = 6',
    )
    options = ["--lake", str(lake.folder), "--max-events", "15", "--json"]
    done = CliRunner().invoke(
        app, ["pipeline", "mirror", '"Order lines"', *options], env={"POSTBUS_DSN": lake.dsn}
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert (figures["pipeline"], figures["state"], figures["rows"]) == ("Order_lines", "done", 21)
    truth = lake.truth("Order lines")
    for row in truth:
        del row["secret"]
    assert lake.rows("Order_lines") == truth
    assert lake.table("Order_lines").schema().names == ["at", "Order", "sku", "price", "qty"]


def test_columns_come_and_go(lake: Lake) -> None:
    lake.sql(
        "create table t (id int primary key, a text, gone int)",
        "insert into t select g, 'x', g from generate_series(1, 10) g",
    )
    lake.capture("t")
    lake.mirror()
    # No default: no row has a value yet, and there is no need to publish all of them.
    lake.sql("alter table t add n numeric(5,1)", "update t set n = 1.5 where id = 1")
    assert lake.mirror().rows == 1
    lake.check()
    # With a default all rows have one at once, and no event says so.
    lake.sql("alter table t add b int default 7")
    lake.mirror()
    lake.check()
    lake.sql("alter table t drop gone", "insert into t values (11, 'y')", "update t set a = 'z' where id = 1")
    lake.mirror()
    assert {r["id"]: r.get("gone") for r in lake.rows() if r["id"] in (1, 2, 11)} == {1: None, 2: 2, 11: None}
    # The same name, and another column.
    lake.sql("alter table t add gone int")
    lake.mirror()
    lake.check()
    # A type that does not hold what the lake's does: no value is lost.
    lake.sql("alter table t alter b type text using 'no ' || b", "alter table t alter a type varchar(40)")
    lake.mirror()
    assert {r["_rescued"] for r in lake.rows()} == {'{"b": "no 7"}'}
    assert "b" not in lake.rows()[0]
    # A column that is gone before the mirror sees it.
    lake.sql("alter table t add brief int", "update t set brief = 5 where id = 2", "alter table t drop brief")
    lake.mirror()
    (two,) = (r for r in lake.rows() if r["id"] == 2)
    assert two["_rescued"] == '{"b": "no 7", "brief": 5}'
    # A key that does not fit cannot be kept elsewhere.
    lake.sql("alter table t alter id type bigint", "insert into t values (5000000000, 'big')")
    with pytest.raises(BadArgument, match=r"key column id has the value 5000000000(.|\n)*--rebuild"):
        lake.mirror()
    lake.mirror(rebuild=True)
    lake.check()
    # The same column, and another name.
    lake.sql("alter table t rename n to m")
    lake.mirror()
    lake.check()


def test_a_batch_that_comes_again(lake: Lake) -> None:
    lake.sql(
        "create table t (id int primary key, n int)", "insert into t select g, 0 from generate_series(1, 9) g"
    )
    lake.capture("t")
    lake.mirror(history=True)
    lake.sql("update t set n = n + 1", "delete from t where id = 1", "insert into t values (10, 0)")
    lake.sql("truncate t", "insert into t values (1, 5), (2, 6)", "update t set n = 7 where id = 1")
    lake.mirror()
    before = lake.rows("t"), lake.rows("t_history"), lake.table().version(), lake.table("t_history").version()
    lake.again()
    run = lake.mirror()
    after = lake.rows("t"), lake.rows("t_history"), lake.table().version(), lake.table("t_history").version()
    assert after == before
    # As if it had died between the versions and the table: the batch is in the one and not in the other.
    max((lake.folder / "t" / "_delta_log").glob("*.json")).unlink()
    assert lake.rows("t") != before[0]
    lake.again()
    run = lake.mirror()
    assert (lake.rows("t"), lake.rows("t_history")) == before[:2]
    assert run.until is not None
    lake.check()
    assert lake.replayed(run.until[STREAM]) == lake.truth()


def test_history(lake: Lake) -> None:
    lake.sql(
        "create table t (id int primary key, n int)", "insert into t select g, 0 from generate_series(1, 4) g"
    )
    lake.capture("t")
    lake.mirror()
    lake.sql("update t set n = 1 where id = 1")
    lake.mirror(history=True)  # from now on

    def versions() -> list[tuple[Any, ...]]:
        rows = sorted(lake.table("t_history").read().to_pylist(), key=lambda r: (r["id"], r["_id"]))
        for row in rows:
            assert row["valid_to"] is None or row["valid_from"] <= row["valid_to"]
            assert (row["valid_to"] is None) == (row["_end_type"] is None)
            assert (row["_end_id"] is None) == (row["_end_type"] in (None, "rebuild"))
        return [(r["id"], r["n"], r["_type"], r["_end_type"]) for r in rows]

    # The update comes in the same batch as the backfill that follows it.
    assert versions()[0] == (1, 1, "update", None)
    assert versions()[1:] == [(i, 0, "snapshot", None) for i in (2, 3, 4)]
    lake.sql(
        "update t set n = 2 where id = 1",
        "update t set n = 3 where id = 1",
        "update t set id = 9 where id = 2",
        "delete from t where id = 3",
        "insert into t values (3, 8)",
    )
    lake.c.execute("select postbus.backfill('t', restart => true)")  # nothing new in it
    lake.mirror(max_events=6)
    changed = [
        (1, 1, "update", "update"),
        (1, 2, "update", "update"),
        (1, 3, "update", None),
        (2, 0, "snapshot", "delete"),
        (3, 0, "snapshot", "delete"),
        (3, 8, "insert", None),
        (4, 0, "snapshot", None),
        (9, 0, "insert", None),
    ]
    assert versions() == changed
    lake.sql("truncate t", "insert into t values (1, 3), (4, 4)")
    lake.mirror(max_events=2)
    ended = [(*v[:3], v[3] or "truncate") for v in changed]
    assert versions() == sorted([*ended, (1, 3, "insert", None), (4, 4, "insert", None)], key=lambda v: v[0])
    # Anew: what was open has ended, and nobody knows more.
    lake.mirror(rebuild=True)
    assert [v for v in versions() if v[3] in (None, "rebuild")] == [
        (1, 3, "insert", "rebuild"),
        (1, 3, "snapshot", None),
        (4, 4, "insert", "rebuild"),
        (4, 4, "snapshot", None),
    ]


def test_refusals(lake: Lake) -> None:
    lake.sql("create table t (id int primary key, a text)", "create table nokey (id int)")
    with pytest.raises(NotFound, match=r"table nowhere does not exist"):
        lake.mirror("nowhere")
    with pytest.raises(BadArgument, match="not the name of a table"):
        lake.mirror("a.b.c.d")
    with pytest.raises(NotFound, match=r"table t is not captured\n.*postbus capture t STREAM"):
        lake.mirror()
    with pytest.raises(BadArgument, match="no stream to capture it to"):
        lake.mirror(capture=True)
    lake.capture("nokey")
    with pytest.raises(BadArgument, match=r"nokey has no key: .*\n.*primary key"):
        lake.mirror("nokey")
    lake.mirror(capture=True, stream=STREAM)
    assert lake.rows() == []
    lake.sql("select postbus.create_stream('two')", "select postbus.capture('t', 'two')")
    with pytest.raises(BadArgument, match="several streams: cdc, two"):
        lake.mirror()
    with pytest.raises(BadArgument, match=r"mirror 't' has the stream cdc, not two\n.*--rebuild"):
        lake.mirror(stream="two")
    assert value(lake.c, "select count(*) from postbus.list_groups() where stream = 'two'") == 0
    lake.sql("select postbus.uncapture('t', 'two')")
    with pytest.raises(BadArgument, match="pipeline 't' has lake"):
        mirror("t", lake=lake.folder / "other", dsn=lake.dsn, spark=lake.bench.spark)
    with pytest.raises(AlreadyExists, match="is of format delta, not iceberg"):
        lake.mirror(format="iceberg")
    lake.sql('create table "T" (id int primary key, _op text)')
    lake.capture('"T"')
    with pytest.raises(BadArgument, match=r"column _op of table .* has a name that the mirror needs"):
        lake.mirror('"T"', name="other")
    lake.sql('alter table "T" rename _op to "ID"')
    with pytest.raises(BadArgument, match="only in case"):
        lake.mirror('"T"', name="other")
    lake.sql('alter table "T" drop "ID"')
    with pytest.raises(BadArgument, match=r"mirror 't' has the table public.t, not"):
        lake.mirror('"T"', name="t")
    with pytest.raises(BadArgument, match="no name for a mirror"):
        lake.mirror(name="so/so")
    lake.sql("select postbus.uncapture('t')", "insert into t values (1, 'missed')")
    lake.capture("t")
    with pytest.raises(BadArgument, match=r"was captured anew(.|\n)*--rebuild"):
        lake.mirror()
    lake.mirror(rebuild=True)
    lake.check()
    lake.sql("alter table t drop constraint t_pkey", "alter table t add primary key (id, a)")
    with pytest.raises(BadArgument, match="has the key id, not id, a"):
        lake.mirror()
    assert value(lake.c, "select count(*) from postbus.list_runs() where state = 'running'") == 0


def test_following(lake: Lake) -> None:
    lake.sql("create table t (id int primary key, a text)", "insert into t values (1, 'there')")
    lake.capture("t")
    stop = threading.Event()
    done: list[Any] = []
    seen: list[int] = []

    def run() -> None:
        done.append(
            lake.mirror(follow=True, every=0.05, stop=stop, progress=lambda n, m, text: seen.append(n))
        )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait(lambda: lake.table().exists() and lake.rows() == [{"id": 1, "a": "there"}], thread)
        lake.sql("alter table t add b int default 3", "insert into t values (2, 'new')")
        # The other row has its default too, by a backfill in between.
        wait(lambda: lake.rows() == lake.truth(), thread)
        with pytest.raises(AlreadyExists, match="is running already"):
            lake.mirror()
    finally:
        stop.set()
        thread.join()
    assert done[0].state == "done"
    assert max(seen) >= 3


def wait(true: Any, thread: threading.Thread) -> None:
    import time

    end = time.monotonic() + 60
    while not true():
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.05)
