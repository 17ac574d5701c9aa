"""What bad input gets: a message that names the option and the remedy, before the job starts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.conftest import run_sql
from tests.spark.lake import Bench, fails
from tests.windows.reading import position, window

pytest.importorskip("pyspark")
from postbus.errors import BadArgument, PostbusError
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


def test_a_checkpoint_of_another_source(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    rate = bench.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    bench.query(rate.selectExpr("cast(value as string) as payload"), tmp_path).awaitTermination()
    with fails("not of this source", "checkpointLocation"):
        bench.drain(tmp_path)


def publishing(bench: Bench, checkpoint: Path, **options: str) -> None:
    """A streaming query into a sink, from start to end."""
    df = bench.reading(startingOffsets="earliest").select("payload")
    options = {"dsn": bench.db.dsn, **options, "checkpointLocation": str(checkpoint)}
    df.writeStream.format("postbus").options(**options).trigger(availableNow=True).start().awaitTermination()


def test_a_stream_into_a_sink_that_will_not_take_it(bench: Bench, tmp_path: Path, server_dsn: str) -> None:
    bench.stream()
    bench.stream("out")
    bench.fill(3)
    nowhere = "host=127.0.0.1 port=1 dbname=x user=me password=secret"
    cases: list[tuple[dict[str, str], tuple[str, ...]]] = [
        ({"stream": "out", "colour": "red"}, ("unknown option colour", "Known options")),
        ({"stream": "nowhere"}, ("option stream", "'nowhere' does not exist", "create_stream")),
        ({"stream": "out", "dsn": nowhere}, ("cannot connect with option dsn", "port=1", "user=me")),
        ({"stream": "out", "dsn": "nonsense"}, ("option dsn is not a connection string",)),
        ({"stream": "out", "dsn": server_dsn}, ("no postbus engine", "postbus install")),
    ]
    for options, saying in cases:
        with pytest.raises(Exception, match=re.escape(saying[0])) as e:
            publishing(bench, tmp_path / "checkpoint", **options)
        for words in saying:
            assert words in str(e.value)
        assert "secret" not in str(e.value)
    assert not (tmp_path / "checkpoint" / "commits" / "0").exists(), "before anything was done"
    assert (
        window(bench.c, position(bench.c, "earliest", of="out"), position(bench.c, of="out"), of="out") == []
    )


def test_a_reader_may_not_publish(bench: Bench, tmp_path: Path) -> None:
    bench.stream()
    role = f"reader_of_{bench.db.name}"
    bench.c.execute(f"create role {role} login in role postbus_reader".encode())
    try:
        with fails("may not publish", "postbus_writer"):
            publishing(bench, tmp_path, stream="orders", dsn=make_conninfo(bench.db.dsn, user=role))
    finally:
        bench.c.execute(f"drop role {role}".encode())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk(bench: Bench, small_disk: Path, tmp_path: Path) -> None:
    """The lake cannot take it all: a clear end, nothing half written, and it goes on when there is room."""
    from postbus.lake import open_table
    from postbus.pipelines import archive

    bench.stream()
    bench.fill(100)
    options: dict[str, Any] = {
        "lake": str(small_disk),
        "checkpoint": str(tmp_path / "checkpoint"),
        "spark": bench.spark,
    }
    assert archive("orders", dsn=bench.db.dsn, **options).rows == 100
    for _ in range(12):
        bench.c.execute(
            "select postbus.publish_batch('orders', array(select string_agg(md5(random()::text), '')"
            " from generate_series(1, 100) i, generate_series(1, 100) j group by i))"
        )
    with pytest.raises(PostbusError, match=r"no space is left|disk is full") as e:
        archive("orders", dsn=bench.db.dsn, **options)
    assert str(small_disk) in str(e.value)
    assert "run" in str(e.value)
    assert open_table(str(small_disk), "events").read(["id"]).num_rows == 100
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    assert archive("orders", dsn=bench.db.dsn, **options).rows == 1200
    ids = open_table(str(small_disk), "events").read(["id"])["id"].to_pylist()
    assert len(ids) == len(set(ids)) == 1300
