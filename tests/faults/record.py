"""Who did what, in a file outside of everything that is tested: it survives kill -9 and crashes.

The oracle: what was sent for certain is seen; what certainly was not is never seen; what was seen twice has
an excuse; messages of one key are done in order.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """One thing that happened to message `number` of `source`."""

    at: float
    pid: int
    source: str
    number: int
    key: str
    attempt: int
    what: str


class Record:
    """A file to which any number of processes write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._offset = 0
        self._lines: list[Line] = []

    def close(self) -> None:
        os.close(self._fd)

    def note(self, source: str, number: int, key: str | None, attempt: int, what: str) -> None:
        """Write a line, in one piece."""
        fields = (time.monotonic(), os.getpid(), source, number, key or "-", attempt, what)
        os.write(self._fd, (" ".join(map(str, fields)) + "\n").encode())

    def lines(self) -> list[Line]:
        """Everything so far."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]  # the last line may be just on its way
        self._offset += len(data)
        for line in data.decode().splitlines():
            at, pid, source, number, key, attempt, what = line.split(" ", 6)
            self._lines.append(Line(float(at), int(pid), source, int(number), key, int(attempt), what))
        return self._lines

    def of(self, *whats: str, source: str | None = None) -> list[Line]:
        """The lines about something."""
        return [x for x in self.lines() if x.what in whats and source in (None, x.source)]

    def count(self, *whats: str) -> int:
        return len(self.of(*whats))

    def sent(self, source: str, what: str = "ok") -> set[int]:
        """What producers know about their messages: ok, failed or unknown."""
        return {x.number for x in self.of(what, source=source)}

    def done(self, source: str) -> set[int]:
        """Messages whose handler has ended well, at least once."""
        return {x.number for x in self.of("end", source=source)}

    def missing(self, source: str) -> set[int]:
        """Messages that were sent for certain and are not done yet."""
        return self.sent(source) - self.done(source)

    def check(self, source: str, *, ordered: bool = False, excused: bool = False) -> None:
        """Nothing lost, nothing invented, nothing out of order; and nothing twice, unless that is excused."""
        assert self.missing(source) == set(), "lost"
        seen = {x.number for x in self.of("begin", source=source)}
        assert seen & self.sent(source, "failed") == set(), "seen, but never sent"
        assert seen <= self.sent(source) | self.sent(source, "unknown"), "seen, but nobody knows it"
        times: dict[int, list[Line]] = defaultdict(list)
        for line in self.of("begin", source=source):
            times[line.number].append(line)
        for number, lines in times.items():
            if len(lines) > 1 and not excused:
                attempts = [x.attempt for x in lines]
                raise AssertionError(f"{source} {number} was begun {len(lines)} times, attempts {attempts}")
        if ordered:
            self.check_order(source)

    def check_order(self, source: str) -> None:
        """No message of a key begins for the first time before the one in front of it has ended."""
        ended: dict[str, int] = defaultdict(lambda: -1)
        keys = self._keys(source)
        for line in self.lines():
            if line.source != source or line.what not in ("begin", "end"):
                continue
            if line.what == "end":
                ended[line.key] = max(ended[line.key], line.number)
            elif line.number > ended[line.key]:
                at = bisect_left(keys[line.key], line.number)
                before = keys[line.key][at - 1] if at else -1
                assert ended[line.key] >= before, (
                    f"{source}: {line.number} of key {line.key} began before {before} had ended"
                )

    def _keys(self, source: str) -> dict[str, list[int]]:
        found: dict[str, set[int]] = defaultdict(set)
        for line in self.of("begin", source=source):
            found[line.key].add(line.number)
        return {key: sorted(numbers) for key, numbers in found.items()}
