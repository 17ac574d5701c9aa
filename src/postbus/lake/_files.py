"""Writing Parquet files of a lake table: partitioned, of a fair size, in bounded memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postbus.lake._place import Place, explained, partition_folder, partition_text
from postbus.lake._stats import Stats, stats_of

FILE_BYTES = 128 * 2**20  # a file ends after the row group that takes it past this
GROUP_BYTES = 32 * 2**20  # a row group, as it lies in memory
BUFFER_BYTES = 96 * 2**20  # what a writer holds back in all
OPEN_FILES = 64


@dataclass
class LakeFile:
    """One data file of a table."""

    path: str  # below the table's folder
    rows: int
    size: int
    partition: dict[str, str | None] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)
    schema: pa.Schema | None = None  # of the file, where a writer has just made it


@dataclass(frozen=True)
class Layout:
    """How the files of a table are written. It goes to the tasks, so it is small."""

    place: Place
    partition_by: tuple[str, ...] = ()
    keep_partitions: bool = False  # whether files hold the partition columns too, as Iceberg's do


class _Open:
    """A file that is being written."""

    def __init__(self, layout: Layout, partition: dict[str, str | None], schema: pa.Schema) -> None:
        folder = partition_folder(partition)
        self.file = LakeFile(f"{folder}/part-{uuid.uuid4().hex}.parquet".lstrip("/"), 0, 0, partition)
        self.file.schema = schema
        self.place = layout.place
        self.footers: list[Any] = []
        with explained(self.place.uri):
            self.place.fs.create_dir(self.place.path(folder), recursive=True)
            self.stream = self.place.fs.open_output_stream(self.place.path(self.file.path))
            self.writer = pq.ParquetWriter(
                self.stream, schema, compression="zstd", compression_level=1, metadata_collector=self.footers
            )

    def write(self, table: pa.Table) -> None:
        with explained(self.place.uri):
            self.writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.file.rows += table.num_rows

    def close(self) -> LakeFile:
        with explained(self.place.uri):
            self.writer.close()
            self.file.size = self.stream.tell()
            self.stream.close()
            self.place.sync(self.file.path)
        assert self.file.schema is not None
        self.file.stats = stats_of(self.footers[0], self.file.schema)
        return self.file

    def abandon(self) -> None:
        with suppress(OSError):  # the disk may be full
            self.writer.is_open = False  # it would write a footer
            self.stream.close()


class FileWriter:
    """Takes batches of rows and makes files of them.

    Example:
        >>> with FileWriter(Layout(Place.of("/tmp/lake", "events"))) as writer:  # doctest: +SKIP
        ...     writer.write(batch)
        ... files = writer.files
    """

    def __init__(self, layout: Layout, file_bytes: int = FILE_BYTES) -> None:
        self.layout = layout
        self.file_bytes = file_bytes
        self.files: list[LakeFile] = []
        self._open: dict[tuple[str | None, ...], _Open] = {}  # the one used last stands last
        self._held: dict[tuple[str | None, ...], list[pa.RecordBatch]] = {}
        self._bytes: dict[tuple[str | None, ...], int] = {}

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            try:
                self.close()
                return
            except BaseException:
                self.discard()
                raise
        self.discard()

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows. Batches may differ in their columns: then a new file begins."""
        for key, part in self._divided(batch):
            held = self._held.setdefault(key, [])
            if held and held[0].schema != part.schema:
                self._flush(key)
                held = self._held.setdefault(key, [])
            held.append(part)
            self._bytes[key] = self._bytes.get(key, 0) + part.nbytes
            if self._bytes[key] >= GROUP_BYTES:
                self._flush(key)
        while sum(self._bytes.values()) > BUFFER_BYTES:
            self._flush(max(self._bytes, key=lambda k: self._bytes[k]))

    def close(self) -> None:
        """Write out what is held and finish all files."""
        for key in list(self._held):
            self._flush(key)
        for key in list(self._open):
            self._finish(key)

    def discard(self) -> None:
        """Leave nothing behind, as far as that is possible; vacuum takes the rest."""
        for one in self._open.values():
            one.abandon()
        for file in [*self.files, *(one.file for one in self._open.values())]:
            with suppress(OSError):
                self.layout.place.delete(file.path)
        self._open, self._held, self._bytes, self.files = {}, {}, {}, []

    def _divided(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
        if batch.num_rows == 0:
            return
        columns = self.layout.partition_by
        if not columns:
            yield (), batch
            return
        for name in columns:  # an empty text is null, in the file as in the folder's name
            if pa.types.is_string(batch.schema.field(name).type):
                at = batch.schema.get_field_index(name)
                cleaned = pc.if_else(pc.equal(batch.column(at), ""), None, batch.column(at))
                batch = batch.set_column(at, batch.schema.field(at), cleaned)
        # One number per combination of values; sorted by it, each combination is one slice.
        codes = [pc.dictionary_encode(batch.column(name), null_encoding="encode") for name in columns]
        number = pc.cast(codes[0].indices, pa.int64())
        for code in codes[1:]:
            number = pc.add(pc.multiply(number, len(code.dictionary)), pc.cast(code.indices, pa.int64()))
        runs = [(0, batch.num_rows)]
        if len(pc.unique(number)) > 1:
            order = pc.sort_indices(number)
            batch, number = batch.take(order), number.take(order)
            ends = pc.run_end_encode(number).run_ends.to_pylist()
            runs = list(zip([0, *ends], ends, strict=False))
        for start, end in runs:
            part = batch.slice(start, end - start)
            key = tuple(partition_text(part.column(name)[0].as_py()) for name in columns)
            yield key, part if self.layout.keep_partitions else part.drop_columns(list(columns))

    def _flush(self, key: tuple[str | None, ...]) -> None:
        held = self._held.pop(key, [])
        self._bytes.pop(key, None)
        if not held:
            return
        table = pa.Table.from_batches(held)
        one = self._open.pop(key, None)
        if one is not None and one.file.schema != table.schema:
            self._open[key] = one
            self._finish(key)
            one = None
        if one is None:
            while len(self._open) >= OPEN_FILES:
                self._finish(next(iter(self._open)))
            partition = dict(zip(self.layout.partition_by, key, strict=True))
            one = _Open(self.layout, partition, table.schema)
        self._open[key] = one
        one.write(table)
        if one.stream.tell() >= self.file_bytes:
            self._finish(key)

    def _finish(self, key: tuple[str | None, ...]) -> None:
        self.files.append(self._open[key].close())
        del self._open[key]


def write_files(
    batches: Iterable[pa.RecordBatch] | pa.Table, layout: Layout, *, file_bytes: int = FILE_BYTES
) -> list[LakeFile]:
    """Write rows as files of a table. They are seen when `LakeTable.append` has added them."""
    with FileWriter(layout, file_bytes) as writer:
        for batch in batches.to_batches() if isinstance(batches, pa.Table) else batches:
            writer.write(batch)
    return writer.files


def rows_of(files: Sequence[LakeFile]) -> int:
    """How many rows files hold."""
    return sum(file.rows for file in files)
