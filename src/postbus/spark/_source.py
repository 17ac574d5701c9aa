"""The data source ``postbus``: streams of a Postgres database as batches and as streams of Spark.

An offset is a position per stream (docs/reference/windows.md): the window between two of them is a set of
events that never changes, so a micro-batch that is replayed is the same, whatever was committed meanwhile.
"""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    In,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from postbus.errors import BadArgument, NotFound, PositionLost
from postbus.spark import _options, _sink
from postbus.spark._read import Part, Task
from postbus.spark._server import Server

if TYPE_CHECKING:
    import pyarrow as pa

Offset = dict[str, Any]  # {"holder": ..., "streams": {name: position}}, the first with "begin" too
RELIST = 10.0  # seconds between looks for new streams that fit subscribePattern


class PostbusSource(DataSource):
    """Reads streams, writes streams, queues and lake tables.

    ``spark.readStream.format("postbus").option("subscribe", "orders")`` and
    ``df.writeStream.format("postbus").option("stream", "totals")``.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._raw = dict(options)

    @cached_property
    def _asked(self) -> _options.Options:
        return _options.parse(self._raw)

    @classmethod
    def name(cls) -> str:
        """What format() takes."""
        return "postbus"

    def schema(self) -> StructType:
        """The columns, once everything that was asked for is known to be there."""
        _Bus(self._asked).check()
        return self._asked.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch: everything between two positions."""
        self._asked.check_mode(streaming=False)
        kind = _PushingReader if self._asked.push_filters else _BatchReader
        return kind(self._asked, self._checked(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream: windows one after another."""
        self._asked.check_mode(streaming=True)
        return _StreamReader(self._asked, self._checked(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch into a stream, a queue or a lake."""
        if self._into_lake(overwrite):
            from postbus.spark import _lake_sink

            return _lake_sink.BatchWriter(_lake_sink.parse(self._raw), schema)
        return _sink.BatchWriter(self._target(schema, overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A stream into a stream, a queue or a lake."""
        if self._into_lake(overwrite):
            from postbus.spark import _lake_sink

            return _lake_sink.StreamWriter(_lake_sink.parse(self._raw), schema)
        return _sink.StreamWriter(self._target(schema, overwrite), schema)

    def _into_lake(self, overwrite: bool) -> bool:
        lake = any(option.lower() == "lake" for option in self._raw)
        if lake and overwrite:
            raise BadArgument(
                "a lake table is not overwritten", hint="Use mode('append') or outputMode('append')."
            )
        return lake

    def _target(self, schema: StructType, overwrite: bool) -> _sink.Target:
        target = _sink.parse(self._raw)
        if overwrite:
            raise BadArgument(
                "a stream or queue cannot be overwritten", hint="Use mode('append') or outputMode('append')."
            )
        _sink.check_schema(schema)
        target.check()
        return target

    def _checked(self, schema: StructType) -> StructType:
        if schema != self._asked.schema:
            raise BadArgument(
                "the schema of this source cannot be changed",
                detail=f"It is {self._asked.schema.simpleString()}",
                hint="Leave .schema() out; choose with option columns, parse JSON with option payloadSchema.",
            )
        _Bus(self._asked).check()
        return schema


class _Bus:
    """The streams that were asked for, and what lies between positions of them."""

    def __init__(self, asked: _options.Options) -> None:
        self.asked = asked
        self.server = Server(asked.dsn)
        self._names: tuple[str, ...] = ()
        self._listed = 0.0

    def check(self) -> None:
        """Everything that can be wrong before the job starts."""
        self.server.check()
        if self.asked.read_from is not None:
            other = Server(self.asked.read_from, "readFrom")
            other.check()
            other.close()
        names = self.names()
        if self.asked.group is not None:
            known = self.server.groups()
            for stream in names:
                if (stream, self.asked.group) not in known:
                    raise NotFound(
                        f"option group: stream {stream!r} has no group {self.asked.group!r}",
                        hint=f"Create it: select postbus.create_group('{stream}', '{self.asked.group}',"
                        ' \'{"ordering": "stream", "start": "earliest"}\').',
                    )
        for option, wanted in (
            ("startingOffsets", self.asked.starting),
            ("endingOffsets", self.asked.ending),
        ):
            if isinstance(wanted, dict):
                self._check_positions(option, wanted, names)
        self.server.close()

    def _check_positions(self, option: str, wanted: Mapping[str, Any], names: Sequence[str]) -> None:
        extra = sorted(set(wanted) - set(names))
        if extra:
            raise BadArgument(
                f"option {option} names stream {extra[0]!r}, which is not subscribed to",
                hint=f"Subscribed are {', '.join(names)}.",
            )
        for stream, position in wanted.items():
            if isinstance(position, dict):
                try:
                    self.server.plan(stream, position, position)
                except PositionLost as exc:
                    if self.asked.fail_on_data_loss:
                        raise _lost(option, exc) from exc

    def names(self) -> tuple[str, ...]:
        """The streams; those that fit a pattern are looked for again from time to time."""
        asked = self.asked
        if self._names and (asked.pattern is None or time.monotonic() < self._listed + RELIST):
            return self._names
        there = self.server.streams()
        if asked.pattern is not None:
            found = [s for s in there if re.fullmatch(asked.pattern, s)]
            if not found and not self._names:
                raise NotFound(
                    f"no stream fits option subscribePattern {asked.pattern!r}", hint=_there(there)
                )
        else:
            found = list(asked.subscribe)
            missing = [s for s in found if s not in there]
            if missing:
                raise NotFound(f"option subscribe: there is no stream {missing[0]!r}", hint=_there(there))
        self._names = tuple(sorted(found))
        self._listed = time.monotonic()
        return self._names

    def resolve(self, wanted: _options.Positions, holder: str, missing: str) -> dict[str, Any]:
        """Positions for all streams: earliest, latest, by time, or as given."""
        names = self.names()
        if isinstance(wanted, str):
            return self.server.positions(names, wanted, holder)
        result: dict[str, Any] = {}
        for stream in names:
            value = wanted.get(stream, missing)
            try:
                result[stream] = (
                    self.server.hold(stream, value, holder)
                    if isinstance(value, dict)
                    else self.server.positions([stream], value, holder)[stream]
                )
            except PositionLost as exc:
                result[stream] = self.instead(stream, holder, "startingOffsets", exc)
        return result

    def instead(self, stream: str, holder: str | None, what: str, exc: PositionLost) -> Any:
        """Where to go on when events are gone: nowhere, unless the user said that it does not matter."""
        if self.asked.fail_on_data_loss:
            raise _lost(what, exc) from exc
        print(f"postbus: {exc.message}; failOnDataLoss is false: going on from the earliest", file=sys.stderr)
        return self.server.positions([stream], "earliest", holder)[stream]

    def plan(self, since: Mapping[str, Any], until: Mapping[str, Any]) -> list[InputPartition]:
        """The windows of all streams, divided into tasks of a fair size."""
        asked = self.asked
        parts: list[tuple[str, str, int]] = []
        shares = max(1, -(-asked.min_partitions // max(1, len(until))))
        for stream in sorted(until):
            if stream in since:
                found = self._plan_one(stream, since[stream], until[stream], shares)
                parts += [(stream, part, events) for part, events in found]
        total = sum(events for _, _, events in parts)
        most = max(1, min(asked.max_per_partition, -(-total // asked.min_partitions)))
        tasks: list[InputPartition] = []
        held = 0
        for one in parts:
            if not tasks or held + one[2] > most:
                tasks.append(Part([]))
                held = 0
            last = tasks[-1]
            assert isinstance(last, Part)
            last.parts.append(one)
            held += one[2]
        return tasks

    def _plan_one(self, stream: str, since: Any, until: Any, shares: int) -> list[tuple[str, int]]:
        if since == until:
            return []
        most = self.asked.max_per_partition
        try:
            return self.server.plan(stream, since, until, shares, most)
        except PositionLost as exc:
            since = self.instead(stream, None, "the offset", exc)
        try:
            return self.server.plan(stream, since, until, shares, most)
        except (PositionLost, BadArgument):  # all of it is gone
            return []

    def task(self, schema: StructType) -> Task:
        asked = self.asked
        return Task(
            dsn=asked.read_from or asked.dsn,
            columns=asked.columns,
            schema=schema,
            payload_schema=asked.payload_schema,
            types=asked.types,
            keys=asked.keys,
            fail_on_data_loss=asked.fail_on_data_loss,
        )


def _there(streams: Sequence[str]) -> str:
    return f"There are: {', '.join(streams[:20])}." if streams else "The database has no streams yet."


def _lost(what: str, exc: PositionLost) -> PositionLost:
    return PositionLost(
        f"{what}: {exc.message}",
        hint="Start over with a new checkpoint, or set option failOnDataLoss to false to go on from what is"
        " left. The stream's retain keeps events longer, and option group keeps them until they are read.",
    )


class _BatchReader(DataSourceReader):
    def __init__(self, asked: _options.Options, schema: StructType) -> None:
        self._bus = _Bus(asked)
        self._task = self._bus.task(schema)

    def partitions(self) -> list[InputPartition]:
        asked = self._bus.asked
        holder = f"spark-batch-{uuid.uuid4().hex[:12]}"
        since = self._bus.resolve(asked.starting or "earliest", holder, "earliest")
        until = self._bus.resolve(asked.ending, holder, "latest")
        tasks = self._bus.plan(since, until)
        self._bus.server.close()
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._task.read(partition) if isinstance(partition, Part) else iter(())


class _PushingReader(_BatchReader):
    """With option pushFilters: ``type`` and ``key`` are compared in the database."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        chosen: dict[str, tuple[str, ...] | None] = {"type": self._task.types, "key": self._task.keys}
        for one in filters:
            column = one.attribute[0] if isinstance(one, EqualTo | In) else None
            if column not in chosen or isinstance(one, EqualTo | In) is False:
                yield one
                continue
            assert isinstance(one, EqualTo | In)
            values = tuple(one.value) if isinstance(one, In) else (one.value,)
            had = chosen[column]
            chosen[column] = values if had is None else tuple(v for v in had if v in values)
        from dataclasses import replace

        self._task = replace(self._task, types=chosen["type"], keys=chosen["key"])


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, asked: _options.Options, schema: StructType) -> None:
        self._bus = _Bus(asked)
        self._task = self._bus.task(schema)
        self._target: dict[str, Any] | None = None  # of Trigger.AvailableNow
        self._now: str | None = None  # and who holds it
        self._initial: Offset | None = None
        self._latest: Offset | None = None
        self._last_trigger: float | None = None
        self._followed: dict[str, Any] = {}

    def initialOffset(self) -> Offset:
        """Where a new query begins. Its holder goes with the offsets: so a restart is known again.

        Spark asks again at every trigger until there is something to read: the answer must stay.
        """
        if self._initial is None:
            holder = f"spark-{uuid.uuid4().hex[:16]}"
            begin = self._bus.resolve(self._bus.asked.starting or "latest", holder, "earliest")
            self._initial = _offset(holder, begin)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        asked = self._bus.asked
        if asked.max_per_trigger is not None:
            return ReadMaxRows(asked.max_per_trigger)
        if asked.min_per_trigger is not None:
            return ReadMinRows(asked.min_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        # Held by a name of its own: the offsets' holder is not known yet.
        self._now = f"spark-now-{uuid.uuid4().hex[:12]}"
        self._target = self._bus.server.positions(self._bus.names(), "latest", self._now)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Up to where the next micro-batch goes."""
        holder, since = self._known(start)
        # The batch that ended here is in the commit log; commit() would say so only with the next one.
        self._follow(since)
        names = self._bus.names()
        # Under a name of its own: a query that waits looks often, and its offsets must stay.
        until = self._target or self._bus.server.positions(names, "latest", f"{holder}-looks")
        self._latest = _offset(holder, until)
        end = dict(since)
        # A stream that is new to this query: first its beginning is written down, then it is read from there.
        new = [s for s in until if s not in since]
        if new:
            end.update(self._bus.server.positions(new, "earliest", holder))
        open_ = {s: until[s] for s in since if s in until and until[s] != since[s]}
        if not open_ and not new and self._now is not None:
            self._bus.server.release(self._now)
            self._now = None
        # Spark does not write down where the first batch begins, which can be an empty one. Should it have to
        # be run again, by a query that was killed, the latest is then another one, and perhaps the earliest.
        begin = since if start == self._initial else None
        if not open_ or self._wait(since, open_, limit):
            return start if end == since and begin is None else _offset(holder, end, begin)
        if isinstance(limit, ReadMaxRows):
            end.update(self._bounded(since, open_, limit.max_rows, holder))
        else:
            for stream, position in open_.items():
                end[stream] = self._bus.server.hold(stream, position, holder)
        self._last_trigger = time.monotonic()
        return start if end == since and begin is None else _offset(holder, end, begin)

    def _known(self, start: Offset) -> tuple[str, dict[str, Any]]:
        """What the checkpoint says, if it is one of this query's streams."""
        try:
            holder, since = start["holder"], start["streams"]
        except (KeyError, TypeError):
            raise BadArgument(
                f"the checkpoint holds an offset that is not of this source: {start}",
                hint="Use another checkpointLocation.",
            ) from None
        names = self._bus.names()
        gone = sorted(set(since) - set(names))
        if gone and (self._bus.asked.pattern is None or self._bus.asked.fail_on_data_loss):
            raise BadArgument(
                f"the checkpoint belongs to stream {gone[0]!r}, which this query does not read",
                hint=f"It reads {', '.join(names)}. Use another checkpointLocation, or the old streams.",
            )
        return holder, {s: p for s, p in since.items() if s not in gone}

    def _wait(self, since: Mapping[str, Any], until: Mapping[str, Any], limit: ReadLimit) -> bool:
        """Whether to wait for more events: minEventsPerTrigger, as long as maxTriggerDelay allows."""
        asked = self._bus.asked
        least = asked.min_per_trigger
        if least is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        if self._last_trigger is None or time.monotonic() >= self._last_trigger + asked.max_delay:
            return False
        there = 0
        for stream, position in until.items():
            try:
                there += self._bus.server.count(stream, since[stream], position, least - there)
            except PositionLost as exc:
                self._bus.instead(stream, None, "the offset", exc)
                return False
            if there >= least:
                return False
        return True

    def _bounded(
        self, since: Mapping[str, Any], until: Mapping[str, Any], most: int, holder: str
    ) -> dict[str, Any]:
        """At most so many events, each stream by its share of what waits."""
        server = self._bus.server
        since = dict(since)
        waiting: dict[str, int] = {}
        for stream, position in until.items():
            try:
                waiting[stream] = sum(n for _, n in server.plan(stream, since[stream], position))
            except PositionLost as exc:
                since[stream] = self._bus.instead(stream, holder, "the offset", exc)
                waiting[stream] = sum(n for _, n in server.plan(stream, since[stream], position))
        end: dict[str, Any] = {}
        left, total = most, sum(waiting.values())
        # The smallest first, so that a large one does not take what rounding leaves to others.
        for stream in sorted(waiting, key=lambda s: (waiting[s], s)):
            share = waiting[stream] if total <= left else max(1, left * waiting[stream] // total)
            share, total = min(share, left), total - waiting[stream]
            if share > 0 or waiting[stream] == 0:
                end[stream] = server.bound(stream, since[stream], until[stream], max(share, 1), holder)
                left -= share
        return end

    def reportLatestOffset(self) -> Offset | None:
        """What the progress of the query shows as latestOffset."""
        return self._latest

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        begin = self._known({**end, "streams": end["begin"]}) if "begin" in end else self._known(start)
        return self._bus.plan(begin[1], self._known(end)[1])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._task.read(partition) if isinstance(partition, Part) else iter(())

    def commit(self, end: Offset) -> None:
        """Everything up to here is done: retention need not wait for it any more."""
        self._follow(self._known(end)[1])

    def _follow(self, done: Mapping[str, Any]) -> None:
        group = self._bus.asked.group
        if group is not None:
            for stream, position in done.items():
                if self._followed.get(stream) != position:
                    try:
                        self._bus.server.follow(stream, group, position)
                    except PositionLost:
                        # The group moves with the next batch, which begins at what is left.
                        if self._bus.asked.fail_on_data_loss:
                            raise
                    self._followed[stream] = position

    def stop(self) -> None:
        self._bus.server.close()


def _offset(holder: str, positions: Mapping[str, Any], begin: Mapping[str, Any] | None = None) -> Offset:
    """An offset whose JSON is the same whenever it means the same."""
    streams = {s: positions[s] for s in sorted(positions)}
    return {"holder": holder, "streams": streams, **({} if begin is None else {"begin": dict(begin)})}
