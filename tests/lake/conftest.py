"""A lake in a folder of the test's own, once of each format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from postbus.lake import LakeTable, catalog_url, open_table


@dataclass
class Lake:
    """A folder, a format, and the database with the catalog."""

    folder: Path
    format: str
    dsn: str | None

    def open(self, name: str = "events", version: int | None = None) -> LakeTable:
        return open_table(str(self.folder), name, format=self.format, dsn=self.dsn, version=version)

    def table(self, schema: pa.Schema, *partition_by: str, name: str = "events") -> LakeTable:
        table = self.open(name)
        table.create(schema, partition_by, writer="test")
        return table

    def elsewhere(self, name: str = "events") -> pa.Table:
        """The table as the format's own library reads it."""
        if self.format == "delta":
            import deltalake

            return deltalake.DeltaTable(str(self.folder / name)).to_pyarrow_table()
        from pyiceberg.catalog.sql import SqlCatalog

        assert self.dsn is not None
        catalog = SqlCatalog("postbus", uri=catalog_url(self.dsn))
        found = catalog.load_table(("postbus", name)).scan().to_arrow()
        catalog.engine.dispose()
        return found


def rows(table: pa.Table, *columns: str) -> list[Any]:
    """Rows as tuples, or the values of one column, in order."""
    found = [tuple(r.values()) for r in table.select(list(columns) or table.column_names).to_pylist()]
    values = [r[0] for r in found] if len(columns) == 1 else found
    try:
        return sorted(values)
    except TypeError:  # there are nulls
        return sorted(values, key=repr)


@pytest.fixture(params=["delta", "iceberg"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    iceberg = request.param == "iceberg"
    dsn = request.getfixturevalue("emptydb").dsn if iceberg else None
    return Lake(tmp_path / "lake", request.param, dsn)
