"""Wake-ups: they come at once, survive broken connections, and are only a hint."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from postbus import Bus, Queue
from postbus.client import _listener, _pace
from postbus.client._listener import Listener
from tests.client.conftest import eventually
from tests.conftest import Database

pytestmark = pytest.mark.direct("it is about LISTEN, which PgBouncer in transaction mode does not have")


@pytest.fixture
def slow_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wake-up nothing happens for a minute."""
    monkeypatch.setattr(_pace, "IDLE", 60.0)
    monkeypatch.setattr(_pace, "POLL", 60.0)


@contextmanager
def consuming(source: Any) -> Iterator[list[tuple[Any, float]]]:
    """Consume in a thread until "end" comes; payloads and when they came."""
    seen: list[tuple[Any, float]] = []

    def consume() -> None:
        with source.messages() as messages:
            for m in messages:
                seen.append((m.payload, time.monotonic()))
                if m.payload == "end":
                    return

    thread = threading.Thread(target=consume)
    thread.start()
    yield seen
    thread.join(30)
    assert not thread.is_alive()


def listening(db: Database) -> list[int]:
    """The backends that listen."""
    with psycopg.connect(db.dsn, autocommit=True) as conn:
        rows = conn.execute(
            """select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
            and query ~ '^(un)?listen "postbus[.]'"""
        )
        return [pid for (pid,) in rows]


@pytest.mark.usefixtures("slow_polls")
def test_latency(bus: Bus, another: Callable[..., Bus], db: Database) -> None:
    queue = bus.queue("emails", create=True)
    stream = bus.stream("orders", create=True)
    group = stream.group("billing")
    producer = another()
    for source, send in (
        (queue, producer.queue("emails").send),
        (group, producer.stream("orders").publish),
    ):
        with consuming(source) as seen:
            eventually(lambda: listening(db))
            sent = []
            for n in range(20):
                sent.append(time.monotonic())
                send(n)
                eventually(lambda n=n, seen=seen: len(seen) > n)  # type: ignore[misc]
                time.sleep(0.02)  # the engine notifies at most once in 10 ms
            send("end")
        delays = [came - went for (_, came), went in zip(seen, sent, strict=False)]
        assert statistics.median(delays) < 0.2
        assert max(delays) < 5


@pytest.mark.usefixtures("slow_polls")
def test_one_right_after_the_other(bus: Bus, another: Callable[..., Bus], db: Database) -> None:
    """The engine notifies at most once in 10 ms: the second has no notification of its own."""
    queue = bus.queue("emails", create=True)
    other = another().queue("emails")
    with consuming(queue) as seen:
        eventually(lambda: listening(db))
        for n in range(20):
            other.send(n)
            eventually(lambda n=n: len(seen) > n)  # type: ignore[misc]
        other.send("end")


@pytest.mark.usefixtures("slow_polls")
def test_listening_backend_is_killed(bus: Bus, another: Callable[..., Bus], db: Database) -> None:
    queue = bus.queue("emails", create=True)
    other = another().queue("emails")
    with consuming(queue) as seen:
        eventually(lambda: len(listening(db)) == 1)
        for n in range(3):
            other.send(n)
            eventually(lambda n=n: len(seen) == n + 1)  # type: ignore[misc]
            [before] = listening(db)
            db.connect().execute("select pg_terminate_backend(%s)", (before,))
            eventually(lambda before=before: listening(db) not in ([], [before]))  # type: ignore[misc]
        other.send("end")
    assert [payload for payload, _ in seen] == [0, 1, 2, "end"]


@pytest.mark.usefixtures("slow_polls")
def test_sent_while_nobody_listened(bus: Bus, another: Callable[..., Bus], db: Database) -> None:
    """Whoever listens again looks: the notification of what was sent in between is lost."""
    queue = bus.queue("emails", create=True)
    other = another().queue("emails")
    with consuming(queue) as seen:
        eventually(lambda: len(listening(db)) == 1)
        bus.listener._pause = 2.0  # so long it stays away
        [pid] = listening(db)
        db.connect().execute("select pg_terminate_backend(%s)", (pid,))
        eventually(lambda: listening(db) == [])
        time.sleep(0.3)  # the look that the broken connection caused is over
        other.send(1)
        assert listening(db) == []
        eventually(lambda: seen)
        other.send("end")


@pytest.mark.usefixtures("slow_polls")
@pytest.mark.parametrize("name", ["A_b.c:d-e", "select", "x" * 55])
def test_names(bus: Bus, another: Callable[..., Bus], db: Database, name: str) -> None:
    queue = bus.queue(name, create=True)
    other = another().queue(name)
    with consuming(queue) as seen:
        eventually(lambda: listening(db))
        other.send(1)
        eventually(lambda: seen)
        other.send("end")


@pytest.mark.usefixtures("slow_polls")
def test_many_consumers_share_one_connection(bus: Bus, another: Callable[..., Bus], db: Database) -> None:
    producer = another()
    queues = [bus.queue(f"q{n}", create=True) for n in range(5)]
    stacks: list[Any] = [consuming(queue) for queue in queues]
    all_seen = [stack.__enter__() for stack in stacks]
    eventually(lambda: len(listening(db)) == 1)
    for n in range(5):
        producer.queue(f"q{n}").send("end")
    for stack in stacks:
        stack.__exit__(None, None, None)
    assert [[payload for payload, _ in seen] for seen in all_seen] == [["end"]] * 5


def test_two_buses_hear_the_same(another: Callable[..., Bus], db: Database) -> None:
    one, two = another(), another()
    stream = one.stream("orders", create=True)
    groups = [one.stream("orders").group("a"), two.stream("orders").group("b")]
    with consuming(groups[0]) as first, consuming(groups[1]) as second:
        eventually(lambda: len(listening(db)) == 2)
        stream.publish(1)
        eventually(lambda: first and second)
        stream.publish("end")


def test_nothing_listens_before_anybody_waits(bus: Bus, db: Database) -> None:
    queue = bus.queue("emails", create=True)
    queue.send(1)
    queue.receive()[0].ack()
    assert listening(db) == []


def test_ends_with_the_bus(db: Database) -> None:
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("postbus")]

    with Bus(db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        queue.send(1)
        for _ in queue.messages():
            break
        eventually(lambda: "postbus-listener" in threads())
    assert threads() == []
    eventually(lambda: listening(db) == [])


def test_without_notifications_it_polls(
    db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_listener, "_SELF_TEST_SECONDS", 0.1)
    monkeypatch.setattr(Listener, "_hears", lambda self, conn: False)
    with caplog.at_level(logging.INFO, "postbus"), Bus(db.dsn) as bus, Bus(db.dsn) as other:
        queue = bus.queue("emails", create=True)
        for n in range(3):
            with consuming(queue) as seen:
                other.queue("emails").send(n)
                eventually(lambda seen=seen: seen)  # type: ignore[misc]
                other.queue("emails").send("end")
    assert len([m for m in caplog.messages if "LISTEN does not work" in m]) == 1


def test_listener_alone(db: Database) -> None:
    listener = Listener(db.dsn)
    heard: dict[str, int] = {}
    unsubscribe = {
        name: listener.subscribe(name, lambda name=name: heard.__setitem__(name, heard.get(name, 0) + 1))  # type: ignore[misc]
        for name in ("a", "b")
    }
    eventually(lambda: listener.works)
    eventually(lambda: set(heard) == {"a", "b"})  # what came before we listened
    heard.clear()
    conn = db.connect()
    conn.execute("select pg_notify('postbus.a', '')")
    eventually(lambda: heard.get("a"))
    unsubscribe["a"]()
    unsubscribe["a"]()
    heard.clear()
    conn.execute("select pg_notify('postbus.a', '')")
    conn.execute("select pg_notify('postbus.b', '')")
    eventually(lambda: heard.get("b"))
    assert "a" not in heard
    listener.close()
    listener.close()


def test_closing_is_quick_when_the_server_does_not_answer() -> None:
    import socket

    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        listener = Listener(f"host=127.0.0.1 port={mute.getsockname()[1]} connect_timeout=4")
        listener.subscribe("a", lambda: None)
        began = time.monotonic()
        listener.close()
        assert time.monotonic() - began < 3.5
    eventually(lambda: listener._thread is None)


def test_many_descriptors(db: Database, queue_with_one: Queue[Any]) -> None:
    """select() ends at 1024."""
    import os
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Bus(db.dsn) as bus:
            queue = bus.queue("emails")
            for m in queue.receive(wait=5):
                assert m.payload == 1
            with consuming(queue) as seen:
                eventually(lambda: bus.listener.works)
                queue.send("end")
            assert [payload for payload, _ in seen] == ["end"]
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def queue_with_one(db: Database) -> Iterator[Queue[Any]]:
    with Bus(db.dsn) as bus:
        queue = bus.queue("emails", create=True)
        queue.send(1)
        yield queue
