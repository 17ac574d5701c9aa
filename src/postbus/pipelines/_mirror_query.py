"""The streaming query of a mirror: from the change stream to batches, and what the run says meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postbus.errors import PositionLost, PostbusError
from postbus.pipelines import _job
from postbus.pipelines._mirror_batch import TYPES, Batches
from postbus.pipelines._mirror_state import Checkpoint
from postbus.pipelines._runs import Recorder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PER_TASK = 25_000  # events, at most: reading JSON is what takes the time


@dataclass
class Changes:
    """The changes of one table, from where its checkpoint is.

    Attributes:
        start: where to begin if the checkpoint is new.
        tell: called with events done and, if that is known, events in all.
    """

    dsn: str
    stream: str
    group: str
    checkpoint: Checkpoint
    start: Any
    batches: Batches
    run: Recorder
    tell: Callable[[int, int | None], None]

    def __post_init__(self) -> None:
        self.before = (self.run.rows, self.run.bytes)
        self.total: int | None = None
        self.events = 0  # of all tables of the stream
        self.batch = -1

    def apply(self, spark: SparkSession, max_events: int, every: float | None, stop: threading.Event) -> None:
        """Apply what there is; or, `every` so many seconds, what comes. Until told to stop."""
        if every is None:
            at = self.checkpoint.done().get(self.stream, self.start)
            self.total = _job.count(self.dsn, {self.stream: at}, [self.stream])
        query: StreamingQuery | None = None
        try:
            query = self._start(spark, max_events, every)
            while not query.awaitTermination(_job.POLL):  # type: ignore[arg-type]
                self._look(query)
                if stop.is_set():
                    break
        except Exception as exc:
            raise _explained(self.batches.error or exc) from exc
        finally:
            if query is not None and query.isActive:
                query.stop()
        self._look(query)

    def _start(self, spark: SparkSession, max_events: int, every: float | None) -> StreamingQuery:
        options = {
            "dsn": self.dsn,
            "subscribe": self.stream,
            "group": self.group,
            "columns": "id,type,key,payload,at",
            "types": ",".join(TYPES),
            "maxEventsPerTrigger": str(max_events),
            "maxEventsPerPartition": str(PER_TASK),
        }
        if not self.checkpoint.begun:
            options["startingOffsets"] = json.dumps(self.start)
        events = spark.readStream.format("postbus").options(**options).load()
        writer = events.writeStream.foreachBatch(self.batches)
        writer = writer.option("checkpointLocation", self.checkpoint.path)
        return _job.start(writer, every)

    def _look(self, query: StreamingQuery) -> None:
        last = query.lastProgress
        if last is not None and last.batchId > self.batch and last.numInputRows:
            self.batch = last.batchId
            self.events += last.numInputRows
            self.run.report(until=self.checkpoint.done())
        rows, size = self.before[0] + self.batches.rows, self.before[1] + self.batches.bytes
        self.run.report(rows=rows, bytes=size, total=self.total)
        done = max(self.events, self.batches.rows)
        self.tell(done, None if self.total is None else max(self.total, done))


def _explained(exc: BaseException) -> PostbusError:
    found = _job.explained(exc)
    if isinstance(found, PositionLost):
        found.hint = "Changes are missing for good: begin anew with rebuild (--rebuild)."
    return found
