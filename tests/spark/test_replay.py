"""replay: from the lake back into a stream or a queue, in order, at a rate, once."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from postbus.errors import BadArgument, NotFound
from postbus.lake import open_table
from postbus.pipelines import Run, archive, replay
from tests.spark.cluster import until
from tests.spark.lake import Bench
from tests.spark.test_archive import command, failing, reach
from tests.stress.sessions import value
from tests.windows.reading import position, window

FROM = "postbus-replayed-from"


def run(bench: Bench, lake: Path, **options: Any) -> Run:
    if "to_queue" not in options:
        options.setdefault("to_stream", "again")
    done = replay(dsn=bench.db.dsn, lake=lake, spark=bench.spark, **options)
    assert isinstance(done, Run)
    return done


def there(bench: Bench, of: str = "again") -> list[str]:
    return window(bench.c, position(bench.c, "earliest", of=of), position(bench.c, of=of), of=of)


def origins(bench: Bench) -> list[str]:
    """Where the events of the stream again came from, in their order."""
    query = (
        "select headers ->> %s from postbus.log l join postbus.stream s on s.id = l.stream_id"
        " where s.name = 'again' order by l.id"
    )
    return [r[0] for r in bench.c.execute(query, [FROM]).fetchall()]


@pytest.fixture
def lake(bench: Bench, tmp_path: Path) -> Path:
    """Two streams in the lake: numbers with keys, and a few events of all sorts."""
    bench.stream(lanes=3)
    bench.stream("sorts")
    bench.stream("again")
    bench.fill(50)
    publish = "select postbus.publish('sorts', %s, %s, %s, %s)"
    for body, type_, key, headers in (
        ("one", "a", "x", {"h": 1}), (b"\0\1", "b", None, None), ("two", "a", None, {}),
        ("three", "c", "x", {FROM: "elsewhere/1"}),
    ):  # fmt: skip
        bench.c.execute(publish, [body, type_, key, None if headers is None else Jsonb(headers)])
    archive(["orders", "sorts"], dsn=bench.db.dsn, lake=tmp_path, spark=bench.spark)
    return tmp_path


def test_everything_in_its_order(bench: Bench, lake: Path) -> None:
    done = run(bench, lake, batch=20, name="all")
    assert (done.rows, done.kind, done.state) == (54, "replay", "done")
    query = (
        "select stream, id, type, key, payload, blob, headers from (select s.name as stream, l.* from"
        " postbus.log l join postbus.stream s on s.id = l.stream_id) x where (stream = 'again') = %s"
        " order by stream, id"
    )
    before = bench.c.execute(query, [False]).fetchall()
    after = bench.c.execute(query, [True]).fetchall()
    assert [r[2:6] for r in after] == [r[2:6] for r in before]
    assert [r[6] for r in after] == [{**(r[6] or {}), FROM: f"{r[0]}/{r[1]}"} for r in before]
    assert value(bench.c, "select count(*) from postbus.staged") == 0
    # It is finished: another run does nothing, also when the table has grown.
    bench.fill(5, first=51)
    archive(["orders", "sorts"], dsn=bench.db.dsn, lake=lake, spark=bench.spark)
    assert run(bench, lake, name="all").rows == 0
    with failing(BadArgument, "pipeline 'all' has types None, not ['a']", "--name"):
        run(bench, lake, name="all", types=["a"])
    assert len(there(bench)) == 54
    # Without a name it is a new one, of the table as it is now.
    assert run(bench, lake, streams=["orders"]).rows == 55


def test_a_choice(bench: Bench, lake: Path) -> None:
    middle = str(value(bench.c, "select to_json(max(at)) #>> '{}' from postbus.log where key like 'k_'"))
    middle = (datetime.fromisoformat(middle) + timedelta(microseconds=1)).isoformat()
    assert run(bench, lake, types=["a", "b"], streams=["sorts"]).rows == 3
    assert run(bench, lake, keys="k3").rows == 5
    expected = ["one", "two"] + [f'{{"n": {i}}}' for i in (3, 13, 23, 33, 43)]
    assert [p for p in there(bench) if p is not None] == expected
    bench.c.execute("select postbus.create_queue('jobs')")
    assert run(bench, lake, since=middle, to_queue="jobs").rows == 4
    got = bench.c.execute("select payload, type, key, headers from postbus.receive('jobs', 10) order by id")
    assert [r[0] for r in got.fetchall()] == ["one", None, "two", "three"]
    assert run(bench, lake, until=middle, streams=["orders"]).rows == 50
    assert run(bench, lake, until="2020-01-01T00:00Z").rows == 0


def test_interrupted_and_continued(bench: Bench, lake: Path) -> None:
    stop = threading.Event()

    def progress(rows: int, total: int | None, text: str) -> None:
        assert total == 54
        if rows >= 20:
            stop.set()

    first = run(bench, lake, batch=10, name="r", stop=stop, progress=progress)
    assert (first.rows, first.state) == (20, "done")
    assert len(there(bench)) == 20
    # What was committed and not reported any more: the record is one batch behind.
    bench.c.execute(
        "update postbus.pipeline set until = until || %s",
        [Jsonb({"batches": 1, "events": 10, "id": 10, "stream": "orders"})],
    )
    # The table has grown and was compacted: the replay is of the version that it began with.
    bench.fill(10, first=51)
    archive(["orders", "sorts"], dsn=bench.db.dsn, lake=lake, spark=bench.spark, compact=True)
    second = run(bench, lake, batch=999, name="r")
    assert second.rows == 44
    ids = [f"orders/{i}" for i in range(1, 51)] + [f"sorts/{i}" for i in range(1, 5)]
    assert origins(bench) == ids
    assert second.until is not None
    assert second.until["finished"] is True


def test_a_rate(bench: Bench, lake: Path) -> None:
    began = time.monotonic()
    done = run(bench, lake, streams=["orders"], rate=40)
    # The last of the five batches of ten is sent when 40 are a second old.
    assert time.monotonic() - began >= 1.0
    assert done.rows == 50
    query = (
        "select max(n) from (select l.at, count(*) over (order by l.at range between current row and"
        " interval '0.9 s' following) as n from postbus.log l join postbus.stream s on s.id = l.stream_id"
        " where s.name = 'again') x"
    )
    assert value(bench.c, query) <= 40
    assert value(bench.c, "select count(distinct at) from postbus.log where headers ? %s", FROM) >= 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed(bench: Bench, lake: Path) -> None:
    given = ("replay", "--lake", str(lake), "--to-stream", "again", "--name", "r")
    with command(bench, *given, "--rate", "8", "--batch", "2") as process:
        reach(bench, process.poll, 6, of="r")
    state = "select state from postbus.pipeline_stats() where pipeline = 'r'"
    until(lambda: value(bench.c, state) == "abandoned", "the server has noticed")
    sent = len(there(bench))
    assert 6 <= sent < 54
    run(bench, lake, name="r")
    assert origins(bench) == [f"orders/{i}" for i in range(1, 51)] + [f"sorts/{i}" for i in range(1, 5)]
    total = "select total_rows from postbus.pipeline_stats() where pipeline = 'r'"
    assert value(bench.c, total) == 54


def test_bad_input(bench: Bench, lake: Path) -> None:
    with failing(BadArgument, "one stream or one queue", "--to-stream"):
        run(bench, lake, to_stream="again", to_queue="jobs")
    with failing(NotFound, "stream 'nowhere' does not exist"):
        run(bench, lake, to_stream="nowhere")
    with failing(NotFound, "queue 'nowhere' does not exist"):
        run(bench, lake, to_queue="nowhere")
    with failing(NotFound, "no delta table nothing"):
        run(bench, lake, table="nothing")
    with failing(BadArgument, "option since is not a time with a zone: 2026-01-01"):
        run(bench, lake, since="2026-01-01")
    with failing(BadArgument, "above 0"):
        run(bench, lake, rate=0)
    import pyarrow as pa

    other = open_table(str(lake), "other")
    other.create(pa.schema({"id": pa.int64()}), writer="me")
    with failing(BadArgument, "lake table other has no column stream"):
        run(bench, lake, table="other")
    assert value(bench.c, "select count(*) from postbus.pipeline_stats()") == 1
    assert there(bench) == []
