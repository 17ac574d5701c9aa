"""Processes that die, servers that crash, and what the tests of them share.

``POSTBUS_FAULT_LONG=1`` (``make fault``) repeats everything more often.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import postbus
from postbus import Bus
from tests.conftest import Database
from tests.faults.record import Record
from tests.worker.conftest import Running
from tests.worker.waiting import eventually

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("POSTBUS_FAULT_LONG"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is a fault test; the long form needs more than the usual time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("fault")
            if LONG:
                item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    made = Record(tmp_path / "record")
    yield made
    made.close()


class Processes:
    """Worker processes; those that still live at the end of the test are killed."""

    def __init__(self, record: Record, directory: Path) -> None:
        self._record = record
        self._directory = directory
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, dsn: str, **config: Any) -> subprocess.Popen[bytes]:
        """Start ``tests.faults.app``; what it says goes to a file."""
        config = {"dsn": dsn, "record": str(self._record.path), **config}
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(postbus.__file__).parents[1])]),
        }
        with (self._directory / f"log-{len(self._all)}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.app", json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=env,
            )
        self._all.append(process)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self._directory / f"log-{self._all.index(process)}").read_text(encoding="utf-8")

    def ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until its handlers have begun to look for messages."""
        eventually(
            lambda: " postbus: worker " in self.log(process) or process.poll() is not None,
            "the worker is ready",
        )

    def stop(self, process: subprocess.Popen[bytes], within: float = 20.0) -> float:
        """SIGTERM; it has to end well. Returns how long it took."""
        self.ready(process)
        began = time.monotonic()
        process.terminate()
        code = process.wait(within)
        assert code == 0, f"exit code {code}: {self.log(process)}"
        assert "Traceback" not in self.log(process), self.log(process)
        return time.monotonic() - began

    def died(self, process: subprocess.Popen[bytes], within: float = 60.0) -> None:
        """Wait for one that kills itself."""
        assert process.wait(within) == -signal.SIGKILL, self.log(process)

    def close(self) -> None:
        for process in self._all:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def processes(record: Record, tmp_path: Path) -> Iterator[Processes]:
    made = Processes(record, tmp_path)
    yield made
    made.close()


@pytest.fixture
def bus(db: Database) -> Iterator[Bus]:
    with Bus(db.dsn, name="test") as made:
        yield made


def prepare(bus: Bus, **options: Any) -> None:
    """The queue ``jobs``, the stream ``events`` with the group ``g`` by key, and the table ``effect``."""
    bus.queue("jobs", create=True, max_attempts=1000, backoff=0, **options)
    bus.stream("events", create=True, lanes=4).group(
        "g", ordering="key", start="earliest", max_attempts=1000, backoff=0, **options
    )
    with bus.pool.connection() as conn:
        conn.execute("create table if not exists effect (source text, n int)")


class Producer:
    """Sends numbers, one after the other, and writes down what became of each.

    Args:
        dsn: where to.
        record: where it writes.
        pause: seconds between two of them.
    """

    def __init__(self, dsn: str, record: Record, *, pause: float = 0.002, keys: int = 5) -> None:
        self._dsn = dsn
        self._record = record
        self._pause = pause
        self._keys = keys
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self.count = 0

    def __enter__(self) -> Producer:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        conn: psycopg.Connection[Any] | None = None
        while not self._stop.is_set():
            try:
                if conn is None:
                    conn = psycopg.connect(self._dsn, application_name="producer", connect_timeout=5)
            except psycopg.Error:
                self._stop.wait(0.05)
                continue
            conn = self._one(conn)
            self._stop.wait(self._pause)
        if conn is not None:
            conn.close()

    def _one(self, conn: psycopg.Connection[Any]) -> psycopg.Connection[Any] | None:
        """One transaction with a message to the queue and an event; every fifth is rolled back."""
        self.count += 1
        number, key = self.count, f"k{self.count % self._keys}"
        what = "failed"
        try:
            conn.execute("select postbus.send('jobs', %s::text, key => %s)", (str(number), key))
            conn.execute("select postbus.publish('events', %s::text, key => %s)", (str(number), key))
            if number % 5 == 0:
                conn.rollback()
            else:
                what = "unknown"  # until the answer to the commit is here
                conn.commit()
                what = "ok"
        except psycopg.Error:
            conn.close()
            return None
        finally:
            for source in ("jobs", "events"):
                self._record.note(source, number, key, 0, what)
        return conn


def wait_until_done(record: Record, *sources: str, within: float = 60.0) -> None:
    """Wait until everything that was sent for certain is done."""
    eventually(lambda: not any(record.missing(s) for s in sources), "all messages are done", within=within)


def settled(bus: Bus) -> bool:
    """Whether nothing is left in the queue and the group."""
    [(jobs,)] = bus.fetch(
        "select ready + delayed + in_flight from postbus.list_queues() where name = 'jobs'", ()
    )
    [(events,)] = bus.fetch("select pending + in_flight + waiting from postbus.list_groups()", ())
    return bool(jobs == 0 and events == 0)


def effects(bus: Bus, source: str) -> list[int]:
    return [n for (n,) in bus.fetch("select n from effect where source = %s order by n", (source,))]


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Workers in this process, in a thread; they must have survived."""
    running: list[Running] = []

    def begin(worker: Any, *, wait: bool = True) -> Running:
        running.append(Running(worker))
        return running[-1].ready() if wait else running[-1]

    yield begin
    for each in running:
        each.worker.stop()
    for each in running:
        each.join()
