"""Batches: what spark.read returns is what the table holds."""

from __future__ import annotations

import datetime as dt
import json

import psycopg
import pytest

from tests.spark.lake import Bench, fails

N = list(range(1, 21))


def test_every_column_equals_the_log(bench: Bench) -> None:
    bench.stream(lanes=3)
    bench.c.execute(
        "select postbus.publish('orders', 'text', type => 'a', key => 'k', headers => '{\"h\": [1]}')"
    )
    bench.c.execute("select postbus.publish('orders', '\\x00ff'::bytea)")
    bench.c.execute("select postbus.publish('orders', 'öçé ''\" {}', key => 'k2')")
    df = bench.batch()
    assert df.columns == ["stream", "id", "tick", "lane", "type", "key", "payload", "blob", "headers", "at"]
    rows = [r.asDict() for r in df.orderBy("id").collect()]
    tick = json.loads(bench.position())["tick"]
    log = bench.c.execute(
        "select 'orders', id, %s::bigint, lane, type, key, payload, blob, headers::text, at"
        " from postbus.log order by id",
        [tick],
    ).fetchall()
    for row, there in zip(rows, log, strict=True):
        at = row.pop("at").replace(tzinfo=dt.UTC)
        blob = row.pop("blob")
        *rest, their_blob, their_headers, their_at = there
        assert (at, None if blob is None else bytes(blob)) == (their_at, their_blob)
        assert list(row.values()) == [*rest, their_headers]


@pytest.mark.parametrize("count", [0, 20, 12_000])
def test_small_and_large(bench: Bench, count: int) -> None:
    """psycopg below, ADBC above; slices of all sizes."""
    bench.stream(lanes=2)
    if count:
        bench.fill(count)
    df = bench.batch(minPartitions=3)
    assert df.count() == count
    assert df.rdd.getNumPartitions() >= min(3, max(count, 1))
    assert bench.numbers() == list(range(1, count + 1))


def test_only_what_is_committed(bench: Bench) -> None:
    bench.stream()
    bench.fill(5)
    with psycopg.connect(bench.db.dsn) as late:
        late.execute("select postbus.publish('orders', '{\"n\": 6}'::text)")
        bench.fill(4, first=7)
        assert bench.numbers() == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert bench.numbers() == N[:10]


def test_positions(bench: Bench) -> None:
    bench.stream()
    bench.stream("other")
    bench.fill(10)
    middle = bench.position()
    bench.fill(10, first=11)
    bench.fill(1, to="other", first=100)
    assert bench.numbers(startingOffsets=middle) == N[10:]
    assert bench.numbers(endingOffsets=middle) == N[:10]
    assert bench.numbers(startingOffsets="latest") == []
    assert bench.numbers(startingOffsets="earliest", endingOffsets="latest") == N
    each = json.dumps({"orders": json.loads(middle), "other": "earliest"})
    assert bench.numbers(subscribe="orders,other", startingOffsets=each) == [*N[10:], 100]
    offset = json.dumps({"holder": "x", "streams": {"orders": json.loads(middle)}})
    assert bench.numbers(startingOffsets=offset) == N[10:]
    with fails("ends before it begins"):
        bench.numbers(startingOffsets="latest", endingOffsets=middle)


def test_timestamps(bench: Bench) -> None:
    bench.stream()
    bench.fill(10)
    at = bench.c.execute("select clock_timestamp()").fetchone()
    assert at is not None
    bench.fill(10, first=11)
    moment = at[0].isoformat()
    assert bench.numbers(startingTimestamp=moment) == N[10:]
    assert bench.numbers(endingTimestamp=moment) == N[:10]


def test_several_streams(bench: Bench) -> None:
    for i, name in enumerate(["orders.eu", "orders.us", "refunds"]):
        bench.stream(name)
        bench.fill(5, to=name, first=i * 5 + 1)
    assert bench.numbers(subscribe="orders.eu, refunds") == [*N[:5], *N[10:15]]
    assert bench.numbers(subscribePattern=r"orders\..*") == N[:10]
    rows = bench.batch(subscribePattern=".*").groupBy("stream").count().collect()
    assert sorted((r.stream, r["count"]) for r in rows) == [
        ("orders.eu", 5),
        ("orders.us", 5),
        ("refunds", 5),
    ]


def test_columns_types_and_keys(bench: Bench) -> None:
    bench.stream(lanes=2)
    for i in range(6):
        args = [f'{{"n": {i}}}', "ab"[i % 2], f"k,{i % 3}"]
        bench.c.execute("select postbus.publish('orders', %s::text, type => %s, key => %s)", args)
    df = bench.batch(columns="key, id", types="a")
    assert df.columns == ["key", "id"]
    assert sorted(tuple(r) for r in df.collect()) == [("k,0", 1), ("k,1", 5), ("k,2", 3)]
    assert bench.numbers(keys='["k,0", "k,1"]') == [0, 1, 3, 4]
    assert bench.numbers(keys='["k,0"]', types="b") == [3]
    assert bench.batch(columns="stream").collect()[0].stream == "orders"


def test_filters_are_pushed_down_on_request(bench: Bench) -> None:
    bench.stream()
    bench.fill(20)
    bench.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        df = bench.batch(pushFilters="true").where("key in ('k1', 'k2') and type = 'default' and id > 10")
        assert sorted(r.id for r in df.collect()) == [11, 12]
        assert bench.batch(pushFilters="true").where("type = 'other'").count() == 0
    finally:
        bench.spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_payloads_as_structs(bench: Bench) -> None:
    bench.stream()
    payloads = [
        '{"id": 1, "name": "x", "tags": ["a", "b"], "amount": 12.50, "at": "2026-01-31T12:00:00Z"}',
        '{"id": "no number", "name": 7, "tags": null, "deep": {"x": 1.5}}',
        "no json",
        "[1]",
    ]
    for p in payloads:
        bench.c.execute("select postbus.publish('orders', %s::text)", [p])
    bench.c.execute("select postbus.publish('orders', '\\x00'::bytea)")
    schema = "id bigint, name string, tags array<string>, amount decimal(10,2), at timestamp"
    schema += ", deep struct<x: double>"
    rows = [r.data for r in bench.batch(payloadSchema=schema, columns="id,data").orderBy("id").collect()]
    assert rows[2:] == [None, None, None]
    first, second = (r.asDict(recursive=True) for r in rows[:2])
    assert (first["id"], first["name"], first["tags"], str(first["amount"])) == (1, "x", ["a", "b"], "12.50")
    assert first["at"] == dt.datetime(2026, 1, 31, 12, 0)
    assert (second["id"], second["name"], second["tags"], second["deep"]) == (None, "7", None, {"x": 1.5})


def test_plain_payloads_are_parsed_at_once(bench: Bench) -> None:
    bench.stream()
    bench.fill(3000)
    df = bench.batch(payloadSchema="n bigint, absent string")
    assert bench.row(df.selectExpr("sum(data.n)", "count(data.absent)")) == [3000 * 3001 // 2, 0]


def test_large_payloads_are_read_in_small_slices(bench: Bench) -> None:
    bench.stream()
    bench.c.execute(
        "select postbus.publish_batch('orders', array(select repeat(md5(i::text), 40000)"
        " from generate_series(1, 40) i))"
    )
    assert bench.row(bench.batch().selectExpr("sum(length(payload))")) == [40 * 40000 * 32]
