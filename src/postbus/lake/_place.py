"""Where a lake table lies, and how its folders are named."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from postbus.errors import BadArgument, PostbusError

NULL = "__HIVE_DEFAULT_PARTITION__"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# What Spark and Hive escape in the names of partition folders: these characters and no others, since they
# read %XX back as one character and not as a byte of UTF-8.
_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")


@dataclass(frozen=True)
class Place:
    """The folder of one table: ``<lake>/<name>``."""

    lake: str
    name: str

    @classmethod
    def of(cls, lake: str, name: str) -> Place:
        """Check the two; a local lake becomes an absolute path."""
        if not lake.strip():
            raise BadArgument(
                "option lake is empty", hint="Name a folder, or a URL such as s3://bucket/lake."
            )
        if not _NAME.fullmatch(name):
            raise BadArgument(
                f"{name!r} is no name for a lake table",
                hint="Use letters, digits, underscore, dot and hyphen, at most 128.",
            )
        url = urlparse(lake)
        if url.scheme == "file":
            lake = unquote(url.path)
        elif "://" in lake:
            return cls(lake.rstrip("/"), name)
        return cls(str(Path(lake).expanduser().absolute()), name)

    @property
    def local(self) -> bool:
        """Whether it is a folder of this machine."""
        return "://" not in self.lake

    @property
    def uri(self) -> str:
        """What the libraries are given."""
        return f"{self.lake}/{self.name}"

    @cached_property
    def _found(self) -> tuple[fs.FileSystem, str]:
        if self.local:
            return fs.LocalFileSystem(), self.uri
        try:
            found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(self.uri)
        except (pa.ArrowInvalid, OSError) as exc:
            raise BadArgument(f"option lake: cannot use {self.lake}: {exc}") from exc
        return found

    @property
    def fs(self) -> fs.FileSystem:
        """The file system of the lake."""
        return self._found[0]

    def path(self, relative: str = "") -> str:
        """A path for `fs`."""
        return f"{self._found[1]}/{relative}" if relative else self._found[1]

    def names(self, relative: str = "") -> list[str]:
        """What a folder holds; nothing if it is not there."""
        found = self.fs.get_file_info(fs.FileSelector(self.path(relative), allow_not_found=True))
        return sorted(info.base_name for info in found)

    def walk(self) -> list[tuple[str, float, int]]:
        """Every file below: its relative path, when it was last changed, its size."""
        root = self.path()
        found = self.fs.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True))
        return [
            (info.path[len(root) :].lstrip("/"), (info.mtime_ns or time.time_ns()) / 1e9, info.size)
            for info in found
            if info.type == fs.FileType.File
        ]

    def folder(self, relative: str = "") -> None:
        """Make a folder if it is missing."""
        with explained(f"{self.uri}/{relative}".rstrip("/")):
            self.fs.create_dir(self.path(relative), recursive=True)

    def check_writable(self) -> None:
        """Say before the job starts that the lake cannot be written."""
        self.folder()
        if self.local and not os.access(self.path(), os.W_OK | os.X_OK):
            raise explanation(self.uri, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))

    def delete(self, relative: str) -> None:
        """Delete a file that nobody needs; that it is gone already is fine."""
        with suppress(FileNotFoundError):
            self.fs.delete_file(self.path(relative))

    def delete_all(self, relative: str = "") -> None:
        """Delete a folder with everything in it."""
        with suppress(FileNotFoundError), explained(self.uri):
            self.fs.delete_dir(self.path(relative))

    def sync(self, relative: str) -> None:
        """Wait until a local file is on disk: the bus forgets what it believes archived."""
        if self.local:
            sync(self.path(relative))


def sync(file: str) -> None:
    """Wait until a file and its name are on disk."""
    for one in (Path(file), Path(file).parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def partition_folder(values: dict[str, str | None]) -> str:
    """The folder of a partition, named as Hive does: ``stream=a%2Fb/date=2026-01-31``."""
    return "/".join(f"{_escaped(k)}={NULL if v is None else _escaped(v)}" for k, v in values.items())


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)


def partition_text(value: Any) -> str | None:
    """The value of a partition column as text. An empty text counts as null, as it does in Delta."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else str(value)


def partition_value(text: str | None, kind: pa.DataType) -> Any:
    """The opposite of `partition_text`."""
    if text is None:
        return None
    if pa.types.is_boolean(kind):
        return text == "true"
    if pa.types.is_integer(kind):
        return int(text)
    return date.fromisoformat(text) if pa.types.is_date(kind) else text


_FULL = ("No space left", "File too large", "Disk quota exceeded")
_FORBIDDEN = ("Permission denied", "Read-only file system", "Operation not permitted")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def explanation(where: str, exc: Exception) -> PostbusError:
    """What an error of the file system means for the user. Libraries hide its number in their text."""
    detail = _COLOURS.sub("", str(exc))
    if any(words in detail for words in _FULL):
        return PostbusError(
            f"cannot write {where}: no space is left",
            detail=detail,
            hint="Free space there and run it again. Nothing of this batch was published.",
        )
    if any(words in detail for words in _FORBIDDEN):
        return PostbusError(
            f"cannot write {where}: permission denied",
            detail=detail,
            hint="Give the user of this process the right to write there, or choose another lake.",
        )
    return PostbusError(f"cannot use {where}", detail=detail, hint="Check option lake.")


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn errors of the file system into those of Postbus."""
    try:
        yield
    except OSError as exc:
        raise explanation(where, exc) from exc
