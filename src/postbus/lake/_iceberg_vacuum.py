"""Vacuum for Iceberg by hand: pyiceberg forgets snapshots, but it deletes no files."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table

from postbus.lake._change import Vacuumed

if TYPE_CHECKING:
    from postbus.lake._iceberg import IcebergTable


def vacuum(lake: IcebergTable, table: Table, older_than: timedelta) -> Vacuumed:
    """Forget old snapshots, then delete what none refers to. Young files stay: they may be on their way."""
    limit = time.time() - older_than.total_seconds()
    _expire(table, limit)
    # First the list of files, then what is needed: a file that is committed in between is then found needed.
    there = lake.place.walk()
    table.refresh()
    below = len(table.location())
    needed = {path[below:].lstrip("/") for path in _referenced(table)}
    files = size = 0
    for path, changed, bytes_ in there:
        if path not in needed and changed < limit:
            lake.place.delete(path)
            files, size = files + 1, size + bytes_
    return Vacuumed(files, size)


def _expire(table: Table, limit: float) -> None:
    """A snapshot is too old when the one after it is: until then it was the table."""
    for _ in range(10):
        named = {ref.snapshot_id for ref in table.metadata.refs.values()}
        shots = sorted(table.metadata.snapshots, key=lambda s: s.sequence_number or 0)
        old = [
            shot.snapshot_id
            for shot, following in pairwise(shots)
            if following.timestamp_ms < limit * 1000 and shot.snapshot_id not in named
        ]
        if not old:
            return
        try:
            table.maintenance.expire_snapshots().by_ids(old).commit()
            return
        except CommitFailedException:
            table.refresh()


def _referenced(table: Table) -> Iterable[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    seen: set[str] = set()
    for shot in table.metadata.snapshots:
        yield shot.manifest_list
        for manifest in shot.manifests(table.io):
            yield manifest.manifest_path
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                    yield entry.data_file.file_path
