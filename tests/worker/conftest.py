"""Workers that run beside the test, in a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from postbus import Bus, Worker
from tests.conftest import Database
from tests.worker.command import Command
from tests.worker.waiting import PATIENCE, eventually


class Running:
    """A worker in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker-under-test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self.worker.run())
        except BaseException as exc:
            self.problem = exc

    def ready(self) -> Running:
        """Wait until it has asked for messages."""

        def asked() -> bool:
            subscriptions = self.worker.subscriptions
            return bool(subscriptions) and all(s.fetched_at is not None for s in subscriptions)

        eventually(lambda: asked() or not self._thread.is_alive(), "the worker is ready")
        self.check()
        return self

    def check(self) -> None:
        """Raise what ended the worker."""
        if self.problem is not None:
            raise self.problem

    def stop(self, within: float = PATIENCE) -> float:
        """Stop it and wait for its end; returns how long that took."""
        began = time.monotonic()
        self.worker.stop()
        self.join(within)
        return time.monotonic() - began

    def join(self, within: float = PATIENCE) -> None:
        self._thread.join(within)
        assert not self._thread.is_alive(), "the worker does not end"
        self.check()


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start workers; they are stopped at the end of the test, and must not have failed."""
    with ExitStack() as stack:

        def begin(worker: Worker, *, wait: bool = True) -> Running:
            running = Running(worker)
            stack.callback(lambda: running._thread.is_alive() and running.stop())
            return running.ready() if wait else running

        yield begin


@pytest.fixture
def bus(db: Database) -> Iterator[Bus]:
    with Bus(db.dsn, name="test") as made:
        yield made


@pytest.fixture
def worker(db: Database) -> Worker:
    """A worker without upkeep, so that nothing else happens."""
    return Worker(db.dsn, name="worker", maintain=False, grace=5)


def empty(bus: Bus, name: str) -> Callable[[], bool]:
    """Whether nothing is left in a queue, neither ready nor in flight."""

    def check() -> bool:
        row = bus.fetch(
            "select ready + delayed + in_flight from postbus.list_queues() where name = %s", (name,)
        )
        return bool(row[0][0] == 0)

    return check


def messages(bus: Bus, name: str) -> list[tuple[str, str, int]]:
    """What is in a queue: payloads, states and attempts."""
    query = "select payload, state, attempt from postbus.peek(%s, max => 1000) order by id"
    return [(str(p), str(s), int(a)) for p, s, a in bus.fetch(query, (name,))]


def dead(bus: Bus, name: str) -> list[tuple[int, str]]:
    """The dead letters of a queue or of all groups of a stream: attempts and reasons."""
    query = "select attempt, reason from postbus.dead_letters(%s) order by id"
    return [(int(attempt), str(reason)) for attempt, reason in bus.fetch(query, (name,))]


@pytest.fixture
def command(tmp_path: Path, db: Database, bus: Bus) -> Iterator[Command]:
    bus.queue("q", create=True, backoff=0)
    made = Command(tmp_path, db.dsn)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
