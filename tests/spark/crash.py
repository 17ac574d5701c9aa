"""What the crash test is made of: producers and upkeep, queries in a driver, and what they have written."""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psycopg import errors
from psycopg.types.json import Jsonb

from tests.stress.actors import SETUP, SHARED_KEYS, STREAM, Producer, connect
from tests.stress.harness import create_stream
from tests.stress.sessions import Connection, value
from tests.windows.reading import position, window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COPY = "copy"
TABLE, CHANGES = "item", "changes"
# What runs in the driver, and the group that follows it.
GROUPS = {"delta": "archive.delta", "iceberg": "archive.iceberg", "mirror": "mirror.mirror", "stream": "sink"}
STATEMENTS = [
    f"insert into {TABLE} values (%(id)s, 1, %(who)s) on conflict (id)"
    f" do update set n = {TABLE}.n + 1, who = %(who)s",
    f"update {TABLE} set n = n + 1, who = %(who)s where id = %(id)s",
    f"delete from {TABLE} where id = %(id)s",
    f"update {TABLE} t set id = 199 - %(id)s where id = %(id)s"
    f" and not exists (select from {TABLE} o where o.id = 199 - %(id)s)",
]
PAUSE = 0.03  # seconds between two transactions of a producer: two cores are for all of us
Row = tuple[str, str | None, int | None]  # uid, key, number of the event within its key


class Plant:
    """Producers and upkeep, in threads, on one stream that keeps what its groups have not read."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.seed = seed
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        with connect(dsn, "setup") as c:
            c.execute(SETUP)
            create_stream(c, lanes=3, segments=3)
            create_stream(c, lanes=2, segments=3, name=CHANGES)
            c.execute("select postbus.create_stream(%s)", [COPY])
            c.execute(f"create table {TABLE} (id int primary key, n int not null, who text)")
            c.execute(f"insert into {TABLE} select i, 0, 'before' from generate_series(0, 199, 2) i")
            c.execute("select postbus.capture(%s, %s)", [TABLE, CHANGES])
            add_group(c, GROUPS["stream"])
            names = [f"k{i}" for i in range(SHARED_KEYS)] + [f"p2-0-{j}" for j in range(5)]
            c.execute("insert into counter select unnest(%s::text[])", [names])
        self.producers = [Producer(dsn, f"p{i}", seed) for i in range(2)]
        self.producers.append(Producer(dsn, "p2-0", seed, two_phase=True))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Producers stop with the block, upkeep goes on until the end."""
        stop = threading.Event()
        writers = [
            threading.Thread(target=self._produce, args=[p, stop], daemon=True) for p in self.producers
        ]
        writers += [
            threading.Thread(target=self._change, args=[f"w{i}", stop], daemon=True) for i in range(2)
        ]
        self.upkeep = threading.Thread(target=self._maintain, daemon=True)
        for t in [*writers, self.upkeep]:
            t.start()
        try:
            yield
        finally:
            stop.set()
            for t in writers:
                t.join(30)

    def close(self) -> None:
        self.over.set()
        self.upkeep.join(30)
        assert not self.faults, self.faults[0]

    def _produce(self, p: Producer, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                p.step()
                time.sleep(PAUSE)
        except Exception:
            self.faults.append(traceback.format_exc())
        finally:
            p.close()

    def _change(self, name: str, stop: threading.Event) -> None:
        """Transactions on the captured table, in any order of rows; some roll back, some deadlock."""
        rnd = random.Random(f"{self.seed}/{name}")
        try:
            with connect(self.dsn, name) as c:
                while not stop.is_set():
                    try:
                        c.execute("begin")
                        for _ in range(rnd.choice([1, 1, 3, 10])):
                            c.execute(rnd.choice(STATEMENTS), {"id": rnd.randrange(200), "who": name})
                        c.execute("rollback" if rnd.random() < 0.1 else "commit")
                    except (errors.DeadlockDetected, errors.UniqueViolation):
                        c.execute("rollback")
                    time.sleep(PAUSE)
        except Exception:
            self.faults.append(traceback.format_exc())

    def _maintain(self) -> None:
        try:
            with connect(self.dsn, "upkeep") as c:
                while not self.over.is_set():
                    for object_, step, done, problem in c.execute(
                        "select * from postbus.maintain()"
                    ).fetchall():
                        assert problem is None, f"{object_} {step}: {problem}"
                        self.done[step] += done
                    time.sleep(0.05)
        except Exception:
            self.faults.append(traceback.format_exc())


def add_group(c: Connection, name: str, start: str = "earliest") -> None:
    options = Jsonb({"start": start, "ordering": "stream"})
    c.execute("select postbus.create_group(%s, %s, %s)", [STREAM, name, options])


def pending(c: Connection, group: str) -> int:
    """What a group has not read, with what is not due yet."""
    c.execute("select postbus.tick(name) from postbus.list_streams()")
    left = value(c, 'select pending from postbus.list_groups() where "group" = %s', group)
    return int(left) + int(value(c, "select count(*) from postbus.scheduled"))


def end_backends(c: Connection) -> int:
    """End every connection of Spark: the drivers', the tasks', the catalog's."""
    return int(
        value(
            c,
            "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and backend_type = 'client backend'"
            " and application_name not like 'stress %%'",
        )
    )


# In the driver.


def run(spark: SparkSession, what: str, dsn: str, out: Path, most: int) -> None:
    """One of the pipelines, for ever."""
    from postbus.pipelines import archive, mirror
    from postbus.spark._session import activate

    activate(spark)
    lake = out / "lake"
    if what in ("delta", "iceberg"):
        archive(STREAM, lake=lake, dsn=dsn, spark=spark, table=what, format=what, follow=True, every=0.1,
                max_events=most)  # fmt: skip
    elif what == "mirror":
        mirror(TABLE, lake=lake, dsn=dsn, spark=spark, name=what, follow=True, every=0.1, max_events=most)
    else:
        events = (
            spark.readStream.format("postbus")
            .options(dsn=dsn, subscribe=STREAM, startingOffsets="earliest", group=GROUPS[what])
            .options(maxEventsPerTrigger=most, minPartitions=2)
            .load()
        )
        writer = events.select("key", "payload").writeStream.queryName(what)
        checkpoint = str(lake / "_postbus" / "checkpoints" / what)
        query = writer.format("postbus").options(dsn=dsn, stream=COPY, checkpointLocation=checkpoint).start()
        query.awaitTermination()


# What they have done.


def batches(out: Path, what: str) -> int:
    """How many batches a query has begun."""
    return len(list((out / "lake" / "_postbus" / "checkpoints" / what / "offsets").glob("[0-9]*")))


def written(c: Connection, dsn: str, out: Path, what: str) -> Counter[Row]:
    """The rows that came through, read without Spark."""
    if what == "stream":
        payloads = window(c, position(c, "earliest", of=COPY), position(c, of=COPY), 4, COPY)
        rows: list[dict[str, Any]] = [{"payload": p} for p in payloads]
    else:
        rows = lake_rows(dsn, out, what)
    found: Counter[Row] = Counter()
    for row in rows:
        body = json.loads(row["payload"])
        assert row.get("key", body["k"]) == body["k"]
        found[body["u"], body["k"], body["s"]] += 1
    return found


def lake_rows(dsn: str, out: Path, name: str) -> list[dict[str, Any]]:
    from postbus.lake import open_table

    kind = "iceberg" if name == "iceberg" else "delta"
    rows: list[dict[str, Any]] = open_table(str(out / "lake"), name, format=kind, dsn=dsn).read().to_pylist()
    return rows


def truth(c: Connection) -> set[Row]:
    """What producers have committed, by their own book."""
    return set(c.execute("select uid, key, seq from published").fetchall())


def compare(got: Counter[Row], wanted: set[Row]) -> None:
    assert wanted - set(got) == set(), "lost"
    assert set(got) - wanted == set(), "never committed"
    assert [row for row, n in got.items() if n > 1] == [], "twice"
