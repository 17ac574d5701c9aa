"""What a Spark job uses, from /proc: CPU and memory of the JVM, of its Python workers and of the server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
EVERY = 0.05  # seconds between looks at the memory


@dataclass
class Usage:
    """CPU seconds, and the most memory that one process of a kind had at a time, in MB."""

    jvm: float = 0.0
    python: float = 0.0
    server: float = 0.0
    jvm_peak: float = 0.0
    python_peak: float = 0.0
    server_peak: float = 0.0

    @property
    def cpu(self) -> float:
        """Of all of them."""
        return self.jvm + self.python + self.server


@dataclass
class Meter:
    """Looks at the processes of this one and of a postmaster on the same machine."""

    postmaster: int | None
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def measured(self) -> Iterator[Usage]:
        """What is used inside the block. The server's shared memory does not count as memory of a backend."""
        usage = Usage()
        before = self._cpu()
        self._stop.clear()
        watcher = threading.Thread(target=self._watch, args=(usage,))
        watcher.start()
        try:
            yield usage
        finally:
            self._stop.set()
            watcher.join()
            after = self._cpu()
            usage.jvm, usage.python, usage.server = (b - a for a, b in zip(before, after, strict=True))

    def _cpu(self) -> tuple[float, float, float]:
        tree = _Tree()
        jvm = python = server = 0.0
        for pid in self._mine(tree):
            own, of_ended = tree.times(pid)
            if tree.is_java(pid):
                jvm += own
                python += of_ended  # children that the JVM has waited for
            else:
                python += own + of_ended
        if self.postmaster is not None:
            server = sum(sum(tree.times(p)) for p in (self.postmaster, *tree.below(self.postmaster)))
        return jvm, python, server

    def _mine(self, tree: _Tree) -> list[int]:
        """Spark's processes; the server can be a child of this process too."""
        return tree.below(os.getpid(), without=self.postmaster)

    def _watch(self, usage: Usage) -> None:
        while not self._stop.wait(EVERY):
            tree = _Tree()
            for pid in self._mine(tree):
                if tree.is_java(pid):
                    usage.jvm_peak = max(usage.jvm_peak, _memory(pid, "VmRSS"))
                elif tree.is_python(pid):  # a copy of the JVM that is about to run something else is not
                    usage.python_peak = max(usage.python_peak, _memory(pid, "VmRSS"))
            if self.postmaster is not None:
                backends = (_memory(p, "RssAnon") for p in tree.below(self.postmaster))
                usage.server_peak = max([usage.server_peak, *backends])


class _Tree:
    """All processes as they are now."""

    def __init__(self) -> None:
        self._stats: dict[int, tuple[str, list[str]]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                except OSError:
                    continue  # it has just ended
                self._stats[int(folder.name)] = (name, rest.split())

    def below(self, pid: int, without: int | None = None) -> list[int]:
        found = [p for p, (_, stat) in self._stats.items() if int(stat[1]) == pid and p != without]
        return found + [q for p in found for q in self.below(p, without)]

    def is_java(self, pid: int) -> bool:
        return self._stats[pid][0] == "java"

    def is_python(self, pid: int) -> bool:
        return self._stats[pid][0].startswith("python")

    def times(self, pid: int) -> tuple[float, float]:
        """Seconds of its own, and of its children that have ended."""
        stat = self._stats[pid][1] if pid in self._stats else ["0"] * 15
        own, ended = int(stat[11]) + int(stat[12]), int(stat[13]) + int(stat[14])
        return own / TICKS, ended / TICKS


def _memory(pid: int, name: str) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    line = next((x for x in status.splitlines() if x.startswith(f"{name}:")), "0 0")
    return int(line.split()[1]) / 1024
