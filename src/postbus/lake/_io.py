"""Metadata of Iceberg that is on disk before the catalog points to it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pyiceberg.io import OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from postbus.lake._place import sync


class SyncedFileIO(PyArrowFileIO):
    """pyiceberg's own, but a local file is flushed when it is closed.

    The catalog is a row of Postgres, which outlives a power cut. So must the file that it names.
    """

    def new_output(self, location: str) -> PyArrowFile:
        """A file to be written."""
        found = super().new_output(location)
        scheme, _, path = self.parse_location(location, self.properties)
        if scheme == "file":
            found.__class__ = _SyncedFile
            found._local = path  # type: ignore[attr-defined]
        return found


class _SyncedFile(PyArrowFile):
    _local: str

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Stream(super().create(overwrite), self._local)


class _Stream:
    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._path = path

    def write(self, data: bytes) -> int:
        return int(self._stream.write(data))

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.close()
            sync(self._path)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
