"""The checkpoint of a query, read before the query runs: mistakes are told before Spark starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from postbus.errors import BadArgument


class Checkpoint:
    """The checkpoint of a query, as far as files tell: who it belongs to, and how far it has come."""

    def __init__(self, path: str) -> None:
        from pyarrow import fs

        self.path = path
        self._root = path
        self._fs: Any = fs.LocalFileSystem()
        if "://" in path:
            self._fs, self._root = fs.FileSystem.from_uri(path)

    def _read(self, name: str) -> str | None:
        try:
            with self._fs.open_input_stream(f"{self._root}/{name}") as file:
                return str(file.read().decode())
        except FileNotFoundError:
            return None

    def _last(self, folder: str) -> int | None:
        from pyarrow import fs

        listing = self._fs.get_file_info(fs.FileSelector(f"{self._root}/{folder}", allow_not_found=True))
        return max((int(f.base_name) for f in listing if f.base_name.isdigit()), default=None)

    @property
    def query(self) -> str | None:
        """The id of the query; None if there is no checkpoint yet."""
        text = self._read("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def _offsets(self, batch: int | None) -> dict[str, Any]:
        text = None if batch is None else self._read(f"offsets/{batch}")
        if not text:
            return {}
        # The offset of the only source is the last line.
        last = text.rstrip("\n").rsplit("\n", 1)[-1]
        try:
            streams = json.loads(last)["streams"]
        except (ValueError, KeyError, TypeError):
            raise BadArgument(
                f"the checkpoint {self.path} is not of a pipeline",
                hint="Use another checkpoint, or another name.",
            ) from None
        return dict(streams)

    def done(self) -> dict[str, Any]:
        """The positions that the last finished batch has reached, by stream."""
        return self._offsets(self._last("commits"))

    def check(self, pipeline: str, streams: Sequence[str]) -> None:
        """It is of these streams.

        Raises:
            BadArgument: it is of others.
        """
        gone = sorted(set(self._offsets(self._last("offsets"))) - set(streams))
        if gone:
            raise BadArgument(
                f"the checkpoint {self.path} belongs to stream {gone[0]!r},"
                f" which pipeline {pipeline!r} does not read",
                hint=f"It reads {', '.join(streams)}. Name the old streams too, or use another --name.",
            )
