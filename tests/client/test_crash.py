"""The server crashes: what was told is there, and what was taken comes again."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from postbus import Bus, LeaseLost
from postbus.embedded import Server
from postbus.engine import install
from tests.client.conftest import eventually
from tests.conftest import SERVER_SETTINGS, fast_directory


@pytest.fixture
def server() -> Iterator[Server]:
    """Commits that do not wait for the disk are lost in a crash: nobody writes them for ten seconds."""
    settings = {**SERVER_SETTINGS, "fsync": "off", "full_page_writes": "off", "wal_writer_delay": "10s"}
    with (
        tempfile.TemporaryDirectory(dir=fast_directory()) as directory,
        Server(Path(directory) / "pg", settings=settings) as made,
    ):
        with psycopg.connect(made.dsn, autocommit=True) as conn:
            install(conn)
        yield made


def crash_and_start(server: Server) -> None:
    os.kill(server.pid, signal.SIGQUIT)  # no checkpoint, no goodbye
    eventually(lambda: not server.running)
    server.start()


@pytest.mark.slow
@pytest.mark.fault
def test_a_late_ack_after_a_crash_finishes_nothing_else(server: Server) -> None:
    """A lease whose token the server has forgotten would give it to the next one."""
    with Bus(server.dsn) as bus, Bus(server.dsn) as other:
        stream = bus.stream("orders", create=True, lanes=2)
        group = stream.group("billing", ordering="key", start="earliest")
        stream.publish_batch(list(range(20)), key=[str(n) for n in range(20)])
        queue = bus.queue("emails", create=True)
        queue.send_batch([1, 2])
        mine = group.consume(max=20).messages
        [taken] = queue.receive().messages
        assert taken.payload == 1
        crash_and_start(server)
        theirs = other.stream("orders").group("billing").consume(max=20).messages
        assert not {m.batch for m in mine} & {m.batch for m in theirs}
        assert not {m.id for m in mine} & {m.id for m in theirs}  # what is on a lease stays there
        [token] = {m.batch for m in mine}
        assert bus.ack(str(token)) == len(mine)
        assert other.ack([m.receipt for m in theirs]) == len(theirs)
        # A claim of a queue may be forgotten: then its receipt is worth nothing, and the message comes again.
        try:
            taken.ack()
            expected = [2]
        except LeaseLost:
            expected = [1, 2]
        assert sorted(m.payload for m in other.queue("emails").receive(max=5)) == expected


@pytest.mark.slow
@pytest.mark.fault
def test_a_loop_goes_on_after_a_crash(server: Server) -> None:
    with Bus(server.dsn) as bus:
        queue = bus.queue("emails", create=True)
        queue.send_batch(list(range(200)))
        seen = []
        for m in queue.messages(max=20, wait=3):
            seen.append(m.payload)
            if len(seen) in (50, 120):
                crash_and_start(server)
        assert set(seen) == set(range(200))
        assert len(seen) < 200 + 2 * 40 + 1  # no more than was on leases came twice
        assert queue.peek() == []
