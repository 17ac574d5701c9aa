"""What bad input gets: a message that names the option and the remedy, before the job starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.conftest import run_sql
from tests.spark.lake import Bench, fails

pytest.importorskip("pyspark")
from postbus.errors import BadArgument
from postbus.spark import _options
from postbus.spark._ddl import parse_schema

BOTH = {"dsn": "dbname=x", "subscribe": "s"}

BAD: list[tuple[dict[str, str], str]] = [
    ({"subscribes": "s"}, "unknown option subscribes|Did you mean subscribe?|Known options"),
    ({"path": "orders"}, "load() takes no path|subscribe"),
    ({"subscribe": ""}, "option subscribe is empty"),
    ({"subscribePattern": "x"}, "subscribe and subscribePattern exclude each other"),
    ({"startingOffsets": "latest", "startingTimestamp": "2026-01-01T00:00:00Z"}, "exclude each other"),
    ({"startingOffsets": "first"}, "option startingOffsets is not JSON|earliest, latest"),
    ({"startingOffsets": '{"s": 5}'}, "does not say where to begin"),
    ({"endingOffsets": "[]"}, "option endingOffsets does not say"),
    ({"startingTimestamp": "yesterday"}, "option startingTimestamp is not a timestamp: yesterday"),
    ({"endingTimestamp": "2026-01-01"}, "has no time zone"),
    ({"maxEventsPerTrigger": "0"}, "option maxEventsPerTrigger must be a whole number from 1"),
    ({"maxEventsPerTrigger": "many"}, "not 'many'"),
    ({"minPartitions": "-1"}, "option minPartitions must be a whole number from 1 up to 100000"),
    ({"minEventsPerTrigger": "5", "maxEventsPerTrigger": "4"}, "(5) is larger than maxEventsPerTrigger (4)"),
    ({"maxTriggerDelay": "5s"}, "no meaning without minEventsPerTrigger"),
    ({"minEventsPerTrigger": "5", "maxTriggerDelay": "soon"}, "option maxTriggerDelay is not a time|15m"),
    ({"failOnDataLoss": "maybe"}, "option failOnDataLoss must be true or false, not 'maybe'"),
    ({"columns": "id,colour"}, "option columns names 'colour'|Columns are stream, id"),
    ({"columns": "id,id"}, "names a column twice"),
    ({"columns": "data"}, "needs option payloadSchema"),
    ({"types": "[1]"}, "option types must hold texts only"),
    ({"keys": "[1"}, "option keys is not a JSON array"),
    ({"payloadSchema": "id"}, "option payloadSchema does not parse: a type is missing"),
]


@pytest.mark.parametrize(("options", "saying"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_options(options: dict[str, str], saying: str) -> None:
    with pytest.raises(BadArgument) as e:
        _options.parse({**BOTH, **options})
    for words in saying.split("|"):
        assert words in str(e.value)


def test_missing_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTBUS_DSN", raising=False)
    with pytest.raises(BadArgument, match="POSTBUS_DSN"):
        _options.parse({"subscribe": "s"})
    with pytest.raises(BadArgument, match="no stream is named"):
        _options.parse({"dsn": "x"})
    with pytest.raises(BadArgument, match="not a regular expression"):
        _options.parse({"dsn": "x", "subscribePattern": "("})
    monkeypatch.setenv("POSTBUS_DSN", "dbname=here")
    assert _options.parse({"SUBSCRIBE": "s"}).dsn == "dbname=here"


@pytest.mark.parametrize(
    ("ddl", "means"),
    [
        ("a int", "struct<a:int>"),
        ("a: BIGINT, `b c` array<map<string, double>>", "struct<a:bigint,b c:array<map<string,double>>>"),
        ("a struct<b: decimal(5, 2), c timestamp>", "struct<a:struct<b:decimal(5,2),c:timestamp>>"),
        (
            '{"type":"struct","fields":[{"name":"a","type":"long","nullable":true,"metadata":{}}]}',
            "struct<a:bigint>",
        ),
    ],
)
def test_schemas(ddl: str, means: str) -> None:
    assert parse_schema(ddl).simpleString() == means


@pytest.mark.parametrize(
    ("ddl", "why"),
    [
        ("", "a column name expected"),
        ("a", "a type is missing"),
        ("a intt", "'intt' is not a type"),
        ("a int b int", "unexpected 'b'"),
        ("a int,", "a column name expected"),
        ("a array<int", "'>' expected"),
        ("a decimal(50)", "does not exist"),
        ("a int, A string", "there twice"),
        ("a int; drop", "unexpected ';'"),
        ('{"type": "strukt"}', "not the JSON of a struct"),
    ],
)
def test_schemas_that_do_not_parse(ddl: str, why: str) -> None:
    with pytest.raises(BadArgument) as e:
        parse_schema(ddl)
    assert why in str(e.value)
    assert "payloadSchema" in str(e.value)


def test_before_the_job_starts(bench: Bench) -> None:
    bench.stream()
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"colour": "red"}, ("unknown option colour",)),
        ({"subscribe": "orders,refunds"}, ("no stream 'refunds'", "There are: orders")),
        ({"subscribePattern": "x.*"}, ("no stream fits", "There are: orders")),
        ({"dsn": "host=127.0.0.1 port=1 dbname=x"}, ("cannot connect with option dsn", "port=1", "refused")),
        ({"dsn": "nonsense"}, ("option dsn is not a connection string",)),
        ({"readFrom": "host=127.0.0.1 port=1"}, ("cannot connect with option readFrom",)),
        ({"payloadSchema": "a intt"}, ("option payloadSchema does not parse",)),
        ({"startingOffsets": '{"refunds": "latest"}'}, ("names stream 'refunds'", "Subscribed are orders")),
        ({"startingOffsets": '{"orders": {}}'}, ("not a position of stream 'orders'",)),
    ]
    for options, saying in cases:
        with fails(*saying):
            bench.batch(**options)
        with fails(*saying):
            bench.reading(**options)
    other = json.loads(bench.position())
    with fails("another snapshot", "failOnDataLoss"):
        bench.batch(startingOffsets=json.dumps({**other, "snapshot": "1:1:"}))
    with fails("has no group 'g'", "postbus.create_group"):
        bench.reading(group="g")


def test_wrong_credentials_do_not_show_the_password(bench: Bench, server_dsn: str) -> None:
    bench.stream()
    role = f"nobody_of_{bench.db.name}"
    run_sql(server_dsn, "create role {} login", role)
    try:
        with fails("may not read streams", "postbus_reader"):
            bench.batch(dsn=make_conninfo(bench.db.dsn, user=role))
    finally:
        run_sql(server_dsn, "drop role {}", role)
    dsn = make_conninfo(bench.db.dsn, user="nobody_at_all", password="very secret")
    with pytest.raises(Exception, match="cannot connect with option dsn") as e:
        bench.batch(dsn=dsn)
    assert "nobody_at_all" in str(e.value)
    assert "very secret" not in str(e.value)


def test_no_engine(bench: Bench, server_dsn: str) -> None:
    with fails("no postbus engine", "postbus install"):
        bench.batch(dsn=server_dsn)


def test_options_of_the_other_mode(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    with fails("option maxEventsPerTrigger is for streams only"):
        bench.batch(maxEventsPerTrigger=5).count()
    with fails("option endingOffsets is for batches only"):
        bench.drain(tmp_path, endingOffsets="latest")
    with fails("the schema of this source cannot be changed"):
        bench.spark.read.format("postbus").options(**bench.options()).schema("a int").load().count()


def test_a_checkpoint_of_another_stream(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    bench.stream("refunds")
    bench.fill(5)
    bench.drain(tmp_path, startingOffsets="earliest")
    with fails("checkpoint belongs to stream 'orders'", "It reads refunds", "checkpointLocation"):
        bench.drain(tmp_path, subscribe="refunds")
    bench.c.execute("select postbus.drop_stream('orders')")
    bench.stream("orders")
    with fails("is lost", "failOnDataLoss"):
        bench.drain(tmp_path)
