"""Delta tables, by delta-rs: a commit is a file of the log that only one writer can create."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from typing import Any
from urllib.parse import unquote

import deltalake
import pyarrow as pa
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import Schema
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from postbus.errors import NotFound
from postbus.lake._change import WEEK, Change, Conflict, Vacuumed
from postbus.lake._files import LakeFile
from postbus.lake._place import Place, explanation, partition_text
from postbus.lake._schema import plain
from postbus.lake._stats import Stats, as_json
from postbus.lake._table import LakeTable

WRITER = "postbus.writer"


class DeltaTable(LakeTable):
    """A table with a log in ``_delta_log``."""

    format = "delta"

    def __init__(self, place: Place, version: int | None = None) -> None:
        super().__init__(place, version)
        self._loaded: deltalake.DeltaTable | None = None

    def _table(self) -> deltalake.DeltaTable:
        if self._loaded is None:
            with self._explained():
                try:
                    self._loaded = deltalake.DeltaTable(self.place.uri, version=self.asked)
                except TableNotFoundError:
                    self._check_there()
                    raise
                except DeltaError as exc:
                    if self.asked is None:
                        raise
                    raise NotFound(
                        f"lake table {self.name} has no version {self.asked}", detail=str(exc)
                    ) from exc
        return self._loaded

    def exists(self) -> bool:
        """Whether it has been created."""
        return self._loaded is not None or deltalake.DeltaTable.is_deltatable(self.place.uri)

    def refresh(self) -> None:
        """See what others have committed."""
        if self._loaded is not None and self.asked is None:
            with self._explained():
                self._loaded.update_incremental()

    def schema(self) -> pa.Schema:
        """Its columns, partition columns included."""
        return plain(pa.schema(self._table().schema().to_arrow()))

    def plain(self, schema: pa.Schema) -> pa.Schema:
        """The schema in the types of this format."""
        return plain(schema)

    @property
    def partition_by(self) -> tuple[str, ...]:
        """Its partition columns."""
        return tuple(self._table().metadata().partition_columns)

    def writer(self) -> str | None:
        """Who writes it: the property ``postbus.writer``."""
        return self._table().metadata().configuration.get(WRITER)

    def version(self) -> int | None:
        """Delta's version."""
        return self._table().version() if self.exists() else None

    def done(self, query: str) -> int | None:
        """The last batch that was committed under this query: Delta's application transaction."""
        return self._table().transaction_version(query)

    def files(self) -> list[LakeFile]:
        """The files that hold its rows now."""
        return [_file(row) for row in pa.table(self._table().get_add_actions()).to_pylist()]

    def _create(self, schema: pa.Schema, partition_by: Sequence[str], writer: str) -> None:
        with self._explained():
            try:
                self._loaded = deltalake.DeltaTable.create(
                    self.place.uri,
                    Schema.from_arrow(schema),
                    partition_by=list(partition_by),
                    configuration={WRITER: writer},
                    raise_if_key_not_exists=False,
                )
            except DeltaError as exc:
                if self.exists():
                    raise Conflict(str(exc)) from exc
                raise
        self._sync()

    def _commit(self, change: Change) -> None:
        table = self._table()
        with self._explained():
            try:
                # In a commit of its own, since delta-rs cannot do it with the files. Should those not follow,
                # the table has columns without values.
                known = set(self.schema().names)
                new = pa.schema([f for f in change.schema if f.name not in known])
                if len(new):
                    table.alter.add_columns(Schema.from_arrow(new).fields)
                table.create_write_transaction(
                    [*(_added(f, change) for f in change.add), *(_removed(f, change) for f in change.remove)],
                    mode="append",
                    schema=Schema.from_arrow(change.schema),
                    partition_by=list(self.partition_by),
                    commit_properties=_properties(change),
                )
                table.update_incremental()
            except CommitFailedError as exc:
                raise Conflict(str(exc)) from exc
        self._sync()

    def _forget(self) -> None:
        self.place.delete_all("_delta_log")
        self._loaded = None

    def _sync(self) -> None:
        if self.place.local:
            self.place.sync(f"_delta_log/{self._table().version():020}.json")

    def vacuum(self, older_than: timedelta = WEEK) -> Vacuumed:
        """Delete files that nobody needs; see `LakeTable.vacuum`. The limit is rounded up to hours."""
        self._check_there()
        self.refresh()
        sizes = {path: size for path, _, size in self.place.walk()}
        with self._explained():
            gone = self._table().vacuum(
                ceil(older_than / timedelta(hours=1)),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
        self.refresh()
        return Vacuumed(len(gone), sum(sizes.get(path, sizes.get(unquote(path), 0)) for path in gone))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise explanation(self.place.uri, exc) from exc
        except CommitFailedError:
            raise
        except DeltaError as exc:
            raise explanation(self.place.uri, exc) from exc


def _properties(change: Change) -> CommitProperties:
    """Who takes files out, or writes a batch down, must have seen all commits before: no blind retries."""
    apart = [] if change.query is None else [Transaction(change.query, change.batch)]
    return CommitProperties(
        app_transactions=apart or None, max_commit_retries=0 if apart or change.remove else None
    )


def _added(file: LakeFile, change: Change) -> AddAction:
    stats: dict[str, Any] = {
        "numRecords": file.rows,
        "minValues": {k: as_json(v) for k, v in file.stats.lower.items() if k not in file.partition},
        "maxValues": {k: as_json(v) for k, v in file.stats.upper.items() if k not in file.partition},
        "nullCount": file.stats.nulls,
    }
    moment = int(time.time() * 1000)
    text = json.dumps(stats, ensure_ascii=False)
    return AddAction(file.path, file.size, file.partition, moment, not change.rearranged, text)


def _removed(file: LakeFile, change: Change) -> RemoveAction:
    moment = int(time.time() * 1000)
    return RemoveAction(file.path, not change.rearranged, moment, file.size, dict(file.partition))


def _file(row: dict[str, Any]) -> LakeFile:
    partition = {k: partition_text(v) for k, v in (row.get("partition") or {}).items()}
    stats = Stats(
        _known(row.get("min")),
        _known(row.get("max")),
        {k: int(v) for k, v in _known(row.get("null_count")).items()},
    )
    return LakeFile(unquote(row["path"]), row["num_records"], row["size_bytes"], partition, stats)


def _known(values: dict[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (values or {}).items() if v is not None and not isinstance(v, dict)}
