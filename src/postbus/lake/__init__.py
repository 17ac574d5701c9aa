"""Lake tables: Parquet files that are added in commits, each batch once.

Delta by delta-rs, Iceberg by pyiceberg with its catalog in Postgres; no Spark, no Java. Needs
``postbus[spark]``.

Example:
    >>> table = open_table("/data/lake", "events")  # doctest: +SKIP
    >>> table.create(pa.schema({"id": pa.int64()}), writer="me")  # doctest: +SKIP
    >>> rows = pa.table({"id": [1, 2]})  # doctest: +SKIP
    >>> table.append(table.write(rows), rows.schema, "my query", 0)  # doctest: +SKIP
    True
"""

from __future__ import annotations

try:
    import pyarrow as pa  # noqa: F401
except ImportError as exc:
    raise ImportError(
        "lake tables need pyarrow, deltalake and pyiceberg: pip install 'postbus[spark]'"
    ) from exc

from postbus.errors import AlreadyExists, BadArgument
from postbus.lake._change import Compacted, Vacuumed
from postbus.lake._files import FileWriter, LakeFile, Layout, write_files
from postbus.lake._place import Place
from postbus.lake._table import LakeTable

__all__ = [
    "Compacted",
    "FileWriter",
    "LakeFile",
    "LakeTable",
    "Layout",
    "Vacuumed",
    "catalog_url",
    "open_table",
    "write_files",
]

FORMATS = ("delta", "iceberg")


def open_table(
    lake: str, name: str, *, format: str = "delta", dsn: str | None = None, version: int | None = None
) -> LakeTable:
    """A table of a lake, which need not exist yet.

    Args:
        lake: a folder, or a URL such as ``s3://bucket/lake``.
        name: the table's name; its files are below ``<lake>/<name>``.
        format: ``delta`` or ``iceberg``.
        dsn: the database that holds the catalog, for Iceberg.
        version: read it as it was: a version of Delta, a snapshot of Iceberg.

    Raises:
        AlreadyExists: there is a table of the other format.
        BadArgument: the format is unknown, or dsn is missing.
    """
    place = Place.of(str(lake), name)
    if format not in FORMATS:
        raise BadArgument(f"option lakeFormat must be delta or iceberg, not {format!r}")
    other = "metadata" if format == "delta" else "_delta_log"
    if any(n.endswith(".json") for n in place.names(other)):
        there = FORMATS[format == "delta"]
        raise AlreadyExists(
            f"lake table {name} at {place.uri} is of format {there}, not {format}",
            hint=f"Set option lakeFormat to {there}, or choose another table.",
        )
    if format == "delta":
        from postbus.lake._delta import DeltaTable

        return DeltaTable(place, version)
    if dsn is None:
        raise BadArgument(
            "option dsn is missing: an Iceberg table has its catalog in Postgres",
            hint="Set it, or the environment variable POSTBUS_DSN.",
        )
    from postbus.lake._iceberg import IcebergTable

    return IcebergTable(place, dsn, version)


def catalog_url(dsn: str) -> str:
    """The URL of the Iceberg catalog in a database: the ``uri`` of a pyiceberg catalog of type sql.

    Example:
        >>> SqlCatalog("postbus", uri=catalog_url("dbname=shop"))  # doctest: +SKIP
    """
    from postbus.lake import _catalog

    return _catalog.catalog_url(dsn)
