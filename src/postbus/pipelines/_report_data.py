"""What a report is made of: events of streams and of the archive, finished messages, dead letters.

From here on, times are microseconds since 1970: numbers that can be divided into buckets, without a zone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg

from postbus.errors import NotFound
from postbus.spark._server import Server

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

EVENTS = "stream string, type string, key string, us bigint"
MESSAGES = (
    "outcome string, kind string, name string, `group` string, attempt bigint, reason string,"
    " began bigint, us bigint"
)
PAGE = 5_000  # rows of a dead letter's page and of an Arrow batch
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Scope:
    """What a report is about."""

    dsn: str
    streams: tuple[str, ...]  # that are in the database
    queues: tuple[str, ...]
    archiving: frozenset[str]  # the queues that keep what is finished
    named: tuple[str, ...] | None  # only these streams; None: all, also those of the archive
    since: datetime | None
    until: datetime | None
    lake: str | None = None
    table: str | None = None  # of the archive; None: there is none
    format: str = "delta"


def micros(at: datetime) -> int:
    """Microseconds since 1970."""
    gone = at - _EPOCH
    return (gone.days * 86_400 + gone.seconds) * 1_000_000 + gone.microseconds


def moment(us: int) -> datetime:
    """The time of so many microseconds since 1970."""
    return datetime.fromtimestamp(us // 1_000_000, UTC).replace(microsecond=us % 1_000_000)


def check_queues(known: Sequence[str], asked: Sequence[str] | None) -> tuple[str, ...]:
    """The queues that were asked for, all of which exist; or all that there are."""
    missing = next((q for q in asked or () if q not in known), None)
    if missing is not None:
        raise NotFound(f"there is no queue {missing!r}", hint=_those(known))
    return tuple(q for q in known if asked is None or q in asked)


def check_streams(server: Server, scope: Scope) -> None:
    """Each stream that was named is in the database or in the archive."""
    archived: set[str | None] | None = set()
    if scope.table is not None and scope.lake is not None:
        from postbus.lake import open_table

        table = open_table(scope.lake, scope.table, format=scope.format, dsn=scope.dsn)
        by_stream = "stream" in table.partition_by
        archived = {f.partition["stream"] for f in table.files()} if by_stream else None
    for stream in scope.named or ():
        if stream not in scope.streams and archived is not None and stream not in archived:
            raise NotFound(f"there is no stream {stream!r}", hint=_those(server.streams()))


def _those(names: Sequence[str]) -> str:
    return f"There are: {', '.join(names[:20])}." if names else "There are none yet."


def events(spark: SparkSession, scope: Scope) -> DataFrame:
    """Each event once, whether it is in its stream, in the archive or in both."""
    live = _live(spark, scope)
    if scope.table is None or scope.lake is None:
        return live.drop("id")
    # An id comes again when a stream is dropped and made anew: that is another event, of another time.
    both = live.unionByName(_archived(spark, scope))
    return both.dropDuplicates(["stream", "id", "us"]).drop("id")


def _live(spark: SparkSession, scope: Scope) -> DataFrame:
    if not scope.streams:
        return spark.createDataFrame([], f"id bigint, {EVENTS}")
    options = {"dsn": scope.dsn, "subscribe": json.dumps(scope.streams), "columns": "stream,id,type,key,at"}
    if scope.since is not None:
        options["startingTimestamp"] = scope.since.isoformat()
    # No endingTimestamp: what was published before it may have been committed after others.
    return _within(spark.read.format("postbus").options(**options).load(), scope)


def _archived(spark: SparkSession, scope: Scope) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812

    from postbus.spark import read_lake

    assert scope.lake is not None
    assert scope.table is not None
    found = read_lake(spark, scope.lake, scope.table, format=scope.format, dsn=scope.dsn)
    if scope.named is not None:
        found = found.where(F.col("stream").isin(*scope.named))
    if "date" in found.columns:  # a partition: whole folders are left out
        for bound, is_in in ((scope.since, F.col("date").__ge__), (scope.until, F.col("date").__le__)):
            if bound is not None:
                found = found.where(is_in(F.lit(bound.astimezone(UTC).date())))
    return _within(found, scope)


def _within(found: DataFrame, scope: Scope) -> DataFrame:
    found = found.selectExpr("id", "stream", "type", "key", "unix_micros(at) as us")
    if scope.since is not None:
        found = found.where(f"us >= {micros(scope.since)}")
    if scope.until is not None:
        found = found.where(f"us < {micros(scope.until)}")
    return found


def messages(spark: SparkSession, scope: Scope) -> DataFrame:
    """Finished messages of queues, and dead letters of queues and groups: outcome finished or dead.

    They are read through the functions that a reader may call, a queue or a stream by one task.
    """
    work = [("finished", "queue", q) for q in scope.queues]
    work += [("dead", "queue", q) for q in scope.queues]
    work += [("dead", "stream", s) for s in scope.streams]
    if not work:
        return spark.createDataFrame([], MESSAGES)
    dsn, since, until = scope.dsn, scope.since, scope.until

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.to_pylist():
                yield from _read(dsn, task, since, until)

    # As many tasks as there are cores: a task costs more than most of these.
    return spark.createDataFrame(work, "outcome string, kind string, name string").mapInArrow(read, MESSAGES)


def _read(
    dsn: str, task: dict[str, str], since: datetime | None, until: datetime | None
) -> Iterator[pa.RecordBatch]:
    server = Server(dsn)
    try:
        conn = server.connection()
        rows = _finished if task["outcome"] == "finished" else _dead
        for page in rows(conn, task["name"], since, until):
            yield _batch(task, page)
    finally:
        server.close()


def _finished(
    conn: psycopg.Connection[Any], name: str, since: datetime | None, until: datetime | None
) -> Iterator[list[Any]]:
    query = (
        'select null::text as "group", attempt, null::text as reason, created_at, finished_at'
        " from postbus.archived(%s, since => %s, until => %s, max => 2147483647)"
    )
    with conn.transaction(), conn.cursor("report") as cursor:
        cursor.execute(query, [name, since, until])
        while page := cursor.fetchmany(PAGE):
            yield page


def _dead(
    conn: psycopg.Connection[Any], name: str, since: datetime | None, until: datetime | None
) -> Iterator[list[Any]]:
    query = (
        "select group_name, attempt, reason, created_at, died_at, id"
        " from postbus.dead_letters(%s, max => %s, after => %s)"
    )
    after = 0
    while page := conn.execute(query, [name, PAGE, after]).fetchall():
        after = page[-1][-1]
        yield [
            row[:-1]
            for row in page
            if (since is None or row[4] >= since) and (until is None or row[4] < until)
        ]


def _batch(task: dict[str, str], page: list[Any]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = {
        "outcome": pa.array([task["outcome"]] * len(page), pa.string()),
        "kind": pa.array([task["kind"]] * len(page), pa.string()),
        "name": pa.array([task["name"]] * len(page), pa.string()),
        "group": pa.array([row[0] or "" for row in page], pa.string()),
        "attempt": pa.array([row[1] for row in page], pa.int64()),
        "reason": pa.array([row[2] for row in page], pa.string()),
        "began": pa.array([micros(row[3]) for row in page], pa.int64()),
        "us": pa.array([micros(row[4]) for row in page], pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns)
