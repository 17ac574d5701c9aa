"""Iceberg tables, by pyiceberg: the catalog is in Postgres, and a commit is one row of it that changes hands.

Files carry no field ids: a task that finds a new column cannot know the id that the commit will give it. The
table has a name mapping instead, as tables have that were made of existing files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import ExpireSnapshots
from pyiceberg.transforms import IdentityTransform
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from postbus.errors import AlreadyExists, NotFound, PostbusError
from postbus.lake._catalog import NAMESPACE, open_catalog
from postbus.lake._change import WEEK, Change, Conflict, Vacuumed
from postbus.lake._files import LakeFile
from postbus.lake._iceberg_files import INTEGERS, Manifests
from postbus.lake._place import Place, explanation
from postbus.lake._schema import plain
from postbus.lake._table import LakeTable

T = TypeVar("T")
WRITER = "postbus.writer"
SNAPSHOTS = 100  # that a table remembers, at least
PATIENCE = 120.0  # seconds for the database to come back
DONE = "postbus.batch."  # and the query: the last batch that was committed
_PROPERTIES = {
    # A repeated commit must first look whether its batch is done: nobody but us repeats it.
    "commit.retry.num-retries": "0",
    "write.metadata.previous-versions-max": "20",
    "write.metadata.delete-after-commit.enabled": "true",
}


class IcebergTable(LakeTable):
    """A table with its metadata in ``metadata`` and its name in ``postbus_lake.iceberg_tables``."""

    format = "iceberg"

    def __init__(self, place: Place, dsn: str, version: int | None = None) -> None:
        super().__init__(place, version)
        self.dsn = dsn
        self._catalog: SqlCatalog | None = None
        self._loaded: Table | None = None

    @property
    def catalog(self) -> SqlCatalog:
        """The catalog in Postgres, made when it is missing."""
        if self._catalog is None:
            self._catalog = open_catalog(self.dsn)
        return self._catalog

    @property
    def identifier(self) -> tuple[str, str]:
        """The table's name in the catalog."""
        return NAMESPACE, self.name

    @property
    def location(self) -> str:
        """Its folder as Iceberg writes it."""
        return f"file://{self.place.uri}" if self.place.local else self.place.uri

    def _table(self) -> Table:
        if self._loaded is None:
            with self._explained():
                catalog = self.catalog
                self._loaded = self._patiently(lambda: catalog.load_table(self.identifier))
            if self._loaded.location() != self.location:
                raise AlreadyExists(
                    f"the Iceberg table {self.name} of this database lies at {self._loaded.location()},"
                    f" not at {self.location}",
                    hint="A database has one lake table of a name: choose another name or that lake.",
                )
            if self.asked is not None and self._loaded.snapshot_by_id(self.asked) is None:
                raise NotFound(
                    f"lake table {self.name} has no version {self.asked}",
                    hint="Versions are snapshots: vacuum removes those that are too old.",
                )
        return self._loaded

    def exists(self) -> bool:
        """Whether it has been created."""
        if self._loaded is None:
            try:
                self._table()
            except NoSuchTableError:
                return False
        return True

    def refresh(self) -> None:
        """See what others have committed."""
        if self._loaded is not None:
            with self._explained():
                self._patiently(self._loaded.refresh)

    def schema(self) -> pa.Schema:
        """Its columns, partition columns included."""
        table = self._table()
        found = table.schema()
        snapshot = table.snapshot_by_id(self.asked) if self.asked is not None else None
        if snapshot is not None and snapshot.schema_id is not None:
            found = table.schemas()[snapshot.schema_id]
        return plain(found.as_arrow(), INTEGERS)

    def plain(self, schema: pa.Schema) -> pa.Schema:
        """The schema in the types of this format."""
        return plain(schema, INTEGERS)

    @property
    def partition_by(self) -> tuple[str, ...]:
        """Its partition columns."""
        return tuple(f.name for f in self._table().spec().fields)

    def writer(self) -> str | None:
        """Who writes it: the property ``postbus.writer``."""
        return self._table().properties.get(WRITER)

    def version(self) -> int | None:
        """Iceberg's snapshot; none if nothing was written yet."""
        if self.asked is not None:
            return self.asked
        snapshot = self._table().current_snapshot() if self.exists() else None
        return None if snapshot is None else snapshot.snapshot_id

    def done(self, query: str) -> int | None:
        """The last batch that was committed under this query: a property of the table."""
        found = self._table().properties.get(DONE + query)
        return None if found is None else int(found)

    def files(self) -> list[LakeFile]:
        """The files that hold its rows now."""
        manifests = Manifests(self._table().metadata, self.place)
        return [manifests.file(found) for found in self._data_files()]

    def _data_files(self) -> list[DataFile]:
        with self._explained():
            return [task.file for task in self._table().scan(snapshot_id=self.asked).plan_files()]

    def _check_empty(self) -> None:
        strange = [n for n in self.place.names("metadata") if n.endswith(".json") and n[:5] != "00000"]
        if strange:
            raise AlreadyExists(
                f"the folder {self.place.uri} holds an Iceberg table that the catalog of this database does"
                " not know",
                hint="It belongs to another database: set option dsn to that, or choose another table.",
            )
        super()._check_empty()

    def _create(self, schema: pa.Schema, partition_by: Sequence[str], writer: str) -> None:
        fresh = assign_fresh_schema_ids(_with_ids(schema))
        spec = PartitionSpec(
            *(
                PartitionField(fresh.find_field(name).field_id, 1000 + at, IdentityTransform(), name)
                for at, name in enumerate(partition_by)
            )
        )
        properties = {
            **_PROPERTIES,
            WRITER: writer,
            "schema.name-mapping.default": fresh.name_mapping.model_dump_json(),
        }
        with self._explained():
            try:
                self._loaded = self.catalog.create_table(
                    self.identifier, fresh, self.location, spec, properties=properties
                )
            except TableAlreadyExistsError as exc:
                raise Conflict(str(exc)) from exc

    def _commit(self, change: Change) -> None:
        table = self._table()
        gone = {file.path for file in change.remove}
        with self._explained():
            try:
                # One transaction: the columns, the files and the batch, and with it the condition that no
                # other snapshot came in between.
                transaction = table.transaction()
                if set(change.schema.names) - {f.name for f in table.schema().fields}:
                    with transaction.update_schema() as update:
                        update.union_by_name(_with_ids(change.schema))
                if change.query is not None:
                    transaction.set_properties({DONE + change.query: str(change.batch)})
                self._expire(transaction)
                manifests = Manifests(transaction.table_metadata, self.place)
                if change.remove:
                    with transaction.update_snapshot().overwrite() as snapshot:
                        for found in self._data_files():
                            if manifests.relative(found.file_path) in gone:
                                snapshot.delete_data_file(found)
                        for file in change.add:
                            snapshot.append_data_file(manifests.described(file))
                else:
                    with transaction.update_snapshot().merge_append() as append:
                        for file in change.add:
                            append.append_data_file(manifests.described(file))
                transaction.commit_transaction()
            except (CommitFailedException, ValidationException) as exc:
                raise Conflict(str(exc)) from exc
            except OperationalError as exc:
                # The answer is lost. Whether the commit is, the record of the batch will say.
                if change.query is None:
                    raise
                raise Conflict(str(exc)) from exc

    def _expire(self, transaction: Transaction) -> None:
        """Forget the oldest snapshots: each commit writes down all of them again.

        Only those that an append followed. Their files are the next one's too, so that vacuum still knows
        which files a young snapshot needs.
        """
        metadata = self._table().metadata
        named = {ref.snapshot_id for ref in metadata.refs.values()}  # tags and branches that users made
        shots = sorted(metadata.snapshots, key=lambda s: s.sequence_number or 0)
        if len(shots) < SNAPSHOTS * 3 // 2:
            return
        old = [
            shot.snapshot_id
            for shot, following in pairwise(shots[:-SNAPSHOTS])
            if shot.snapshot_id not in named
            and following.sequence_number == (shot.sequence_number or 0) + 1
            and following.summary is not None
            and following.summary.operation == Operation.APPEND
        ]
        if old:
            ExpireSnapshots(transaction).by_ids(old).commit()

    def _forget(self) -> None:
        with self._explained():
            self.catalog.drop_table(self.identifier)
        self._loaded = None

    def _patiently(self, call: Callable[[], T]) -> T:
        """Outlive a lost connection: a server that restarts is no reason to end a query."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def vacuum(self, older_than: timedelta = WEEK) -> Vacuumed:
        """Delete files that nobody needs; see `LakeTable.vacuum`."""
        from postbus.lake._iceberg_vacuum import vacuum

        self._check_there()
        self.refresh()
        with self._explained():
            return vacuum(self, self._table(), older_than)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            raise PostbusError(
                f"files of the Iceberg table {self.name} are missing: {exc}",
                hint="Was the lake moved or deleted? Restore it. Or forget the table: delete its row from"
                " postbus_lake.iceberg_tables.",
            ) from exc
        except OSError as exc:
            raise explanation(self.place.uri, exc) from exc
        except SQLAlchemyError as exc:
            raise PostbusError(
                f"the catalog of Iceberg table {self.name} in Postgres cannot be used",
                detail=str(exc).partition("\n[SQL")[0],
                hint="Check option dsn and the rights of its user on the schema postbus_lake.",
            ) from exc


def _with_ids(schema: pa.Schema) -> Schema:
    """An Iceberg schema with ids that only serve to tell columns apart."""
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids

    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(schema))
