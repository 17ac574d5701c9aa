"""What a mirror remembers between runs, in the folder of Spark's checkpoint: they live and go together."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from postbus.errors import PostbusError
from postbus.pipelines import _job

FILE = "mirror.json"


@dataclass
class State:
    """What the mirror was begun with, unless it says otherwise."""

    table: str
    stream: str
    keys: list[str]
    format: str
    captured: str  # when: another time means another capture
    start: Any  # the position before the backfill
    columns: dict[str, list[Any]]  # number and type of each, at the last backfill
    history: bool = False
    query: str = field(default_factory=lambda: uuid.uuid4().hex)  # whose batches the lake table counts


class Checkpoint(_job.Checkpoint):
    """The checkpoint of the mirror's query, with the state of the mirror beside it."""

    @property
    def begun(self) -> bool:
        """Whether Spark knows where to go on. Where its first batch begins, Spark does not write down."""
        return self._last("commits") is not None

    def load(self) -> State | None:
        """The state, or None: the mirror is new."""
        text = self._read(FILE)
        if text is None:
            return None
        try:
            return State(
                **{k: v for k, v in json.loads(text).items() if k in {f.name for f in fields(State)}}
            )
        except (ValueError, TypeError, AttributeError) as exc:
            raise PostbusError(
                f"{self.path}/{FILE} cannot be read: {exc}",
                hint="Delete the folder: the mirror then begins anew.",
            ) from exc

    def save(self, state: State) -> None:
        """Write the state, whole or not at all."""
        from postbus.lake._place import explained

        with explained(self.path):
            self._fs.create_dir(self._root, recursive=True)
            with self._fs.open_output_stream(f"{self._root}/{FILE}.new") as out:
                out.write(json.dumps(asdict(state), indent=1).encode())
            self._fs.move(f"{self._root}/{FILE}.new", f"{self._root}/{FILE}")

    def wipe(self) -> None:
        """Forget everything. The state goes first: without it the rest belongs to nobody."""
        from pyarrow import fs

        if self._fs.get_file_info(f"{self._root}/{FILE}").type == fs.FileType.File:
            self._fs.delete_file(f"{self._root}/{FILE}")
        if self._fs.get_file_info(self._root).type == fs.FileType.Directory:
            self._fs.delete_dir(self._root)
