"""What the tables of all formats have in common: everything but how a commit is written down."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from postbus.errors import AlreadyExists, BadArgument, NotFound, PostbusError
from postbus.lake import _rewrite
from postbus.lake._change import WEEK, Change, Compacted, Conflict, Vacuumed
from postbus.lake._evolve import reconciled
from postbus.lake._files import FILE_BYTES, LakeFile, Layout, rows_of, write_files
from postbus.lake._place import Place, partition_value
from postbus.lake._schema import check_partitions, conform, grown

TRIES = 50


class LakeTable(ABC):
    """A table of files that other tools can read, and that a batch is added to once.

    Got from `postbus.lake.open_table`.
    """

    format: str

    def __init__(self, place: Place, version: int | None = None) -> None:
        self.place = place
        self.asked = version

    @property
    def name(self) -> str:
        """The table's name in its lake."""
        return self.place.name

    @abstractmethod
    def exists(self) -> bool:
        """Whether it has been created."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Its columns, partition columns included."""

    @property
    @abstractmethod
    def partition_by(self) -> tuple[str, ...]:
        """Its partition columns."""

    @abstractmethod
    def writer(self) -> str | None:
        """Who writes it: the property ``postbus.writer``."""

    @abstractmethod
    def version(self) -> int | None:
        """Delta's version or Iceberg's snapshot; none if nothing was written yet."""

    @abstractmethod
    def done(self, query: str) -> int | None:
        """The last batch that was committed under this query."""

    @abstractmethod
    def files(self) -> list[LakeFile]:
        """The files that hold its rows now."""

    @abstractmethod
    def refresh(self) -> None:
        """See what others have committed."""

    @abstractmethod
    def vacuum(self, older_than: timedelta = WEEK) -> Vacuumed:
        """Delete files that nobody needs.

        Those that no version younger than the limit refers to, and those of attempts that failed. Younger
        files stay: a writer may be about to commit them.

        Args:
            older_than: how long readers of old versions and running writers may take.
        """

    @abstractmethod
    def _create(self, schema: pa.Schema, partition_by: Sequence[str], writer: str) -> None:
        """Make it. Raises Conflict if somebody else just did."""

    @abstractmethod
    def _commit(self, change: Change) -> None:
        """One commit. Raises Conflict if anything happened in between that matters to it."""

    @abstractmethod
    def _forget(self) -> None:
        """Make it no table any more, before its files go."""

    @abstractmethod
    def plain(self, schema: pa.Schema) -> pa.Schema:
        """The schema in the types of this format."""

    @property
    def layout(self) -> Layout:
        """How its files are written."""
        return Layout(self.place, self.partition_by, keep_partitions=self.format == "iceberg")

    def create(self, schema: pa.Schema, partition_by: Sequence[str] = (), *, writer: str) -> bool:
        """Create the table, or check that it is this writer's. Returns whether it was created.

        Args:
            schema: the first columns; others come when rows have them.
            partition_by: columns that divide the files.
            writer: who writes it. Nobody else may.

        Raises:
            AlreadyExists: another writer made it, or it is partitioned otherwise.
            BadArgument: the schema has types that a lake cannot hold.
        """
        if not writer:
            raise BadArgument("a lake table needs the name of its writer")
        if not self.exists():
            wanted = self.plain(schema)
            check_partitions(wanted, partition_by, self.name)
            self.place.check_writable()
            self._check_empty()
            try:
                self._create(wanted, tuple(partition_by), writer)
                return True
            except Conflict:
                self.refresh()
        self._check_mine(writer, tuple(partition_by))
        self.place.check_writable()
        return False

    def _check_empty(self) -> None:
        other = next(
            (n for n in self.place.names() if not n.startswith(("_", ".")) and n != "metadata"), None
        )
        if other is not None:
            raise AlreadyExists(
                f"the folder {self.place.uri} is no lake table, and it is not empty: there is {other!r}",
                hint="Choose another table or lake, or empty the folder.",
            )

    def drop(self, writer: str) -> bool:
        """Delete the table with all its files, old versions included. Returns whether there was one.

        Args:
            writer: who writes it. Nobody else may.
        """
        if not self.exists():
            return False
        self._check_writer(writer)
        self._forget()
        self.place.delete_all()
        return True

    def _check_mine(self, writer: str, partition_by: tuple[str, ...]) -> None:
        self._check_writer(writer)
        if partition_by != self.partition_by:
            raise AlreadyExists(
                f"lake table {self.name} is partitioned by {_list(self.partition_by)},"
                f" not by {_list(partition_by)}",
                hint="Partitioning never changes: set option partitionBy to that, or write to a new table.",
            )

    def _check_writer(self, writer: str) -> None:
        owner = self.writer()
        if owner != writer:
            whose = "was not made by Postbus" if owner is None else f"is written by {owner!r}"
            raise AlreadyExists(
                f"lake table {self.name} at {self.place.uri} {whose}, not by {writer!r}",
                hint="Choose another table or lake. To hand it over, set its property postbus.writer.",
            )

    def write(self, rows: pa.Table | Iterable[pa.RecordBatch]) -> list[LakeFile]:
        """Write rows as files for `append`. Nobody sees them before."""
        batches = rows.to_batches() if isinstance(rows, pa.Table) else rows
        return write_files((self._fitting(batch) for batch in batches), self.layout)

    def _fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """In the types of the table where it has the columns, so that its files are alike."""
        given = self.plain(batch.schema)
        table = grown(self.schema(), given, self.name)
        partitions = [table.field(n) for n in self.partition_by if n not in given.names]
        return conform(batch, pa.schema([*(table.field(n) for n in given.names), *partitions]))

    def append(
        self, files: Sequence[LakeFile], schema: pa.Schema, query: str | None = None, batch: int = 0
    ) -> bool:
        """Add files in one commit, together with the record that this batch is done.

        Args:
            files: what `write` or a task has written.
            schema: the columns of the rows; the table gets those that it lacks.
            query: who counts the batches. Without it nothing is recorded.
            batch: its number; they rise.

        Returns:
            False, and nothing is added, if this batch or a later one was committed before. A batch without
            rows is not recorded.
        """
        wanted = self.plain(schema)

        def plan() -> Change | None:
            target, ready = reconciled(self, grown(self.schema(), wanted, self.name), files)
            return Change(target, ready, query=query, batch=batch) if files else None

        return self._transact(plan, query, batch)

    def merge(
        self, changes: pa.Table, on: Sequence[str], query: str, batch: int, *, truncate: bool = False
    ) -> bool:
        """Put rows into the table and take rows out, in one commit: the table mirrors another one.

        Args:
            changes: the columns of the table and ``_op`` ("upsert" or "delete"), one row per key.
            on: the key columns; never null.
            query: who counts the batches.
            batch: its number; they rise.
            truncate: everything that was there before goes.

        Returns:
            False, and nothing changes, if this batch or a later one was committed before.
        """
        change = _rewrite.Changes.of(changes, on, self.name)
        wanted = self.plain(change.upserts.schema)

        def plan() -> Change | None:
            target = grown(self.schema(), wanted, self.name)
            add, remove = _rewrite.merged(self, target, change, truncate)
            return Change(target, add, remove, query, batch) if add or remove else None

        return self._transact(plan, query, batch)

    def compact(self, target_bytes: int = FILE_BYTES) -> Compacted:
        """Put small files together, partition by partition. Readers see the same rows."""
        add: list[LakeFile] = []
        remove: list[LakeFile] = []

        def plan() -> Change | None:
            nonlocal add, remove
            # Where others have only added files, what was written for a commit that came too late will do.
            live = {file.path for file in self.files()}
            if not remove or any(file.path not in live for file in remove):
                add, remove = _rewrite.compacted(self, target_bytes)
            return Change(self.schema(), add, remove, rearranged=True) if remove else None

        self._transact(plan, None, 0)
        return Compacted(len(remove), len(add), rows_of(add))

    def _transact(self, plan: Callable[[], Change | None], query: str | None, batch: int) -> bool:
        """Plan and commit, again and again until nobody was faster. Never the same batch twice."""
        if self.asked is not None:
            raise BadArgument(
                f"lake table {self.name} was opened at version {self.asked}: it is only read there"
            )
        self._check_there()
        for attempt in range(TRIES):
            self.refresh()
            last = None if query is None else self.done(query)
            if last is not None and last >= batch:
                return False
            change = plan()
            if change is None:
                return True
            try:
                self._commit(change)
                return True
            except Conflict as exc:
                lost = exc
            time.sleep(random.uniform(0, min(1.0, 0.01 * 2**attempt)))  # noqa: S311 - so that two part
        raise PostbusError(
            f"cannot commit to lake table {self.name}: others committed before, {TRIES} times",
            detail=str(lost),
            hint="Let fewer jobs write to one table, or run it again.",
        )

    def _check_there(self) -> None:
        if not self.exists():
            raise NotFound(
                f"there is no {self.format} table {self.name} in lake {self.place.lake}",
                hint="Check the names of the lake and the table, and the format; or create it.",
            )

    def dataset(self) -> ds.Dataset:
        """The table for pyarrow, to read it in pieces."""
        self._check_there()
        schema, parquet = self.schema(), ds.ParquetFileFormat()
        fragments = [
            parquet.make_fragment(
                self.place.path(file.path),
                filesystem=self.place.fs,
                partition_expression=_partition(file.partition, schema),
            )
            for file in self.files()
        ]
        return ds.FileSystemDataset(fragments, schema, parquet, self.place.fs)

    def read(self, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> pa.Table:
        """The rows, or those that an expression of pyarrow chooses.

        Example:
            >>> table.read(["id"], where=pc.field("stream") == "orders")  # doctest: +SKIP
        """
        chosen = None if columns is None else list(columns)
        return self.dataset().to_table(columns=chosen, filter=where)


def _partition(values: dict[str, str | None], schema: pa.Schema) -> pc.Expression:
    expression = pc.scalar(True)
    for name, text in values.items():
        kind = schema.field(name).type
        scalar: Any = pa.scalar(partition_value(text, kind), kind)
        one = pc.field(name).is_null() if text is None else pc.field(name) == scalar
        expression = one if expression.equals(pc.scalar(True)) else expression & one
    return expression


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
