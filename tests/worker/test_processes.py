"""Handlers in other processes: those that hang, those that die, and what they raise."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from postbus import Bus, Message, Worker
from tests.worker.conftest import Start, dead, empty
from tests.worker.waiting import eventually


@pytest.fixture
def q(bus: Bus) -> str:
    bus.queue("q", create=True, backoff=0, max_attempts=20)
    return "q"


def naps(m: Message[Any]) -> None:
    with Path(m.payload["log"]).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {m.attempt}\n")
    if m.attempt == 1:
        if m.payload["how"] == "hangs":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_processes_that_hang_or_die(
    worker: Worker, bus: Bus, start: Start, q: str, how: str, tmp_path: Any
) -> None:
    log = tmp_path / "log"
    # Long enough to start a process in, on a machine that has much else to do.
    worker.queue(q, process=True, concurrency=2, timeout=8 if how == "hangs" else None)(naps)
    start(worker)
    bus.queue(q).send({"log": str(log), "how": how})
    eventually(empty(bus, q), "another process did it")
    (first, one), (second, two) = (line.split() for line in log.read_text().splitlines())
    assert (one, two) == ("1", "2")
    assert first != second
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


def test_other_messages_do_not_suffer_from_a_process_that_dies(
    worker: Worker, bus: Bus, start: Start, q: str, tmp_path: Any
) -> None:
    log = tmp_path / "log"
    worker.queue(q, process=True, concurrency=2)(waits_for)
    start(worker)
    bus.queue(q).send({"log": str(log), "how": "waits"})
    eventually(log.exists, "at work")
    bus.queue(q).send({"log": str(log), "how": "dies"})
    eventually(empty(bus, q), "both are done")
    assert sorted(log.read_text().split()) == ["dies-1", "dies-2", "waits-1"]


def waits_for(m: Message[Any]) -> None:
    """One waits until the other has died and come again."""
    path = Path(m.payload["log"])
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{m.payload['how']}-{m.attempt}\n")
    if m.payload["how"] == "dies" and m.attempt == 1:
        os._exit(9)
    until = time.monotonic() + 30
    while m.payload["how"] == "waits" and "dies-2" not in path.read_text(encoding="utf-8"):
        assert time.monotonic() < until
        time.sleep(0.01)


class PeculiarError(Exception):
    """It cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def peculiar(m: Message[Any]) -> None:
    raise PeculiarError("this", "that")


def test_exceptions_of_another_process(worker: Worker, bus: Bus, start: Start, q: str) -> None:
    worker.queue(q, process=True, max_attempts=1)(peculiar)
    start(worker)
    bus.queue(q).send("x")
    eventually(lambda: dead(bus, q), "failed")
    assert "PeculiarError: this and that" in dead(bus, q)[0][1]
