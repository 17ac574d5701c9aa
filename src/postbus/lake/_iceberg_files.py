"""Files of an Iceberg table, as manifests describe them and as we do."""

from __future__ import annotations

from datetime import date
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from postbus.lake._files import LakeFile
from postbus.lake._place import Place, partition_text, partition_value
from postbus.lake._schema import plain
from postbus.lake._stats import Stats, has_bounds

INTEGERS = (pa.int32(), pa.int64())
EPOCH = date(1970, 1, 1)


class Manifests:
    """Both directions, for one state of the table."""

    def __init__(self, metadata: TableMetadata, place: Place) -> None:
        self.metadata = metadata
        self.place = place
        self.schema: Schema = metadata.schema()
        self.kinds = plain(self.schema.as_arrow(), INTEGERS)
        self.names = {f.field_id: f.name for f in self.schema.fields}
        self.specs = metadata.specs()

    @cached_property
    def _plan(self) -> Any:
        return compute_statistics_plan(self.schema, self.metadata.properties)

    @cached_property
    def _paths(self) -> dict[str, int]:
        return parquet_path_to_id_mapping(self.schema)

    def relative(self, path: str) -> str:
        """A path of Iceberg's below the table's folder."""
        return path[len(self.metadata.location) :].lstrip("/")

    def described(self, file: LakeFile) -> DataFile:
        """What a manifest says of a file; bounds come from its footer."""
        spec = self.metadata.spec()
        with self.place.fs.open_input_file(self.place.path(file.path)) as stream:
            footer = pq.read_metadata(stream)
        statistics = data_file_statistics_from_parquet_metadata(footer, self._plan, self._paths)
        partition = [
            _inside(partition_value(file.partition[f.name], self.kinds.field(f.name).type))
            for f in spec.fields
        ]
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self.metadata.location}/{file.path}",
            file_format=FileFormat.PARQUET,
            partition=Record(*partition),
            file_size_in_bytes=file.size,
            sort_order_id=None,
            spec_id=spec.spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def file(self, found: DataFile) -> LakeFile:
        """What we say of a file that a manifest has."""
        partition = {
            f.name: partition_text(_outside(found.partition[at], self.kinds.field(f.name).type))
            for at, f in enumerate(self.specs[found.spec_id].fields)
        }
        nulls = {self.names[i]: n for i, n in (found.null_value_counts or {}).items() if i in self.names}
        return LakeFile(
            self.relative(found.file_path),
            found.record_count,
            found.file_size_in_bytes,
            partition,
            Stats(self._bounds(found.lower_bounds), self._bounds(found.upper_bounds), nulls),
        )

    def _bounds(self, found: dict[int, bytes] | None) -> dict[str, Any]:
        bounds: dict[str, Any] = {}
        for number, raw in (found or {}).items():
            kind = self.kinds.field(self.names[number]).type if number in self.names else pa.null()
            # Texts are cut in Iceberg's bounds, which its own readers know.
            if has_bounds(kind) and not pa.types.is_string(kind):
                value = from_bytes(self.schema.find_type(number), raw)  # type: ignore[arg-type]
                bounds[self.names[number]] = _outside(value, kind)
        return bounds


def _inside(value: Any) -> Any:
    """A partition value as manifests hold it: days since 1970 for a date."""
    return (value - EPOCH).days if isinstance(value, date) else value


def _outside(value: Any, kind: pa.DataType) -> Any:
    """The opposite of `_inside`, and the same for bounds, where times are microseconds."""
    if isinstance(value, int) and (pa.types.is_date32(kind) or pa.types.is_timestamp(kind)):
        return pa.scalar(value, kind).as_py()
    return value
