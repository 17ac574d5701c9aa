"""The jobs that are measured, each on the same session, database and rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench._database import Connection, Database
from bench._spark import _data, _jdbc
from bench._spark._usage import Meter, Usage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = "orders"


@dataclass(frozen=True)
class Plan:
    """What this run measures."""

    rows: int
    tasks: int
    flat: tuple[int, ...]
    jdbc: Path
    only: str = ""


@dataclass
class Job:
    """One contender: what it runs, and what it used in each round."""

    name: str
    rows: int
    run: Callable[[], None]
    seconds: list[float]
    usage: list[Usage]

    @property
    def rates(self) -> list[float]:
        """Rows per second, of each round."""
        return [self.rows / s for s in self.seconds]

    @property
    def cpus(self) -> list[float]:
        """CPU seconds per million rows, of each round."""
        return [u.cpu / self.rows * 1e6 for u in self.usage]


class Spark:
    """The jobs, on one session and one database."""

    def __init__(self, db: Database, plan: Plan, folder: Path, session: SparkSession) -> None:
        self.db, self.plan, self.folder, self.spark = db, plan, folder, session
        self.conn: Connection = db.connect()
        self.jdbc = _jdbc.Jdbc(session, db.dsn)
        self.meter = Meter(_postmaster(self.conn))
        self.turns = 0

    def source(self, stream: str = STREAM) -> DataFrame:
        """What Postbus reads."""
        options = {"dsn": self.db.dsn, "subscribe": stream, "columns": _data.COLUMNS}
        return self.spark.read.format("postbus").options(minPartitions=self.plan.tasks, **options).load()

    def plain(self, stream: str = STREAM, rows: int | None = None) -> DataFrame:
        """What JDBC reads: the same rows."""
        return self.jdbc.read(f"{stream}_plain", rows or self.plan.rows, self.plan.tasks)

    def to_noop(self, df: DataFrame) -> None:
        """Read everything, keep nothing."""
        df.write.format("noop").mode("overwrite").save()

    def to_parquet(self, df: DataFrame) -> None:
        """Write files, as Spark does."""
        df.write.mode("overwrite").parquet(str(self.folder / "parquet"))

    def to_lake(self, df: DataFrame) -> None:
        """Write a new Delta table."""
        self.turns += 1
        options = {"lake": str(self.folder / "lake"), "table": f"turn_{self.turns}"}
        df.write.format("postbus").options(**options).mode("append").save()

    def to_stream(self, rows: int | None = None) -> None:
        """Publish, exactly once."""
        df = _data.made(self.spark, rows or self.plan.rows, self.plan.tasks)
        df.write.format("postbus").options(dsn=self.db.dsn, stream="out").mode("append").save()

    def to_table(self, table: str) -> None:
        """Insert through JDBC."""
        self.jdbc.write(_data.made(self.spark, self.plan.rows, self.plan.tasks), table)

    def clear(self) -> None:
        """Before a turn: what is written to is empty, and no checkpoint falls into the turn."""
        _data.tables(self.conn, "out")
        self.conn.execute("select postbus.drop_stream(name) from postbus.list_streams() where name = 'out'")
        self.conn.execute("select postbus.maintain()")
        self.conn.execute("select postbus.create_stream('out')")
        self.conn.execute("checkpoint")

    def turn(self, job: Job, *, keep: bool = True) -> None:
        """Run a job once."""
        self.clear()
        with self.meter.measured() as usage:
            start = time.monotonic()
            job.run()
            seconds = time.monotonic() - start
        if keep:
            job.seconds.append(seconds)
            job.usage.append(usage)


def _postmaster(conn: Connection) -> int | None:
    """Its process id, where it runs on this machine."""
    row = conn.execute("select pg_read_file('postmaster.pid'), pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0].split()[0]) if Path(f"/proc/{row[1]}").exists() else None
