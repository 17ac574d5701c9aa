"""What a commit does, and what upkeep did."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pyarrow as pa

from postbus.lake._files import LakeFile

WEEK = timedelta(days=7)


class Conflict(Exception):  # noqa: N818 - not an error yet: the commit is tried again
    """Somebody else committed in between."""


@dataclass
class Change:
    """What one commit does. All of it is seen at once, or nothing."""

    schema: pa.Schema
    add: list[LakeFile]
    remove: list[LakeFile] = field(default_factory=list)
    query: str | None = None
    batch: int = 0
    rearranged: bool = False  # the same rows in other files


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    files_before: int
    files_after: int
    rows: int


@dataclass(frozen=True)
class Vacuumed:
    """What a vacuum deleted."""

    files: int
    bytes: int
