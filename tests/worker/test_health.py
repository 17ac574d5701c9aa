"""The health endpoint."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import psycopg
import pytest
from psycopg import sql

from postbus import BadArgument, Bus, Message, Worker
from postbus.worker import _health
from tests.conftest import Database
from tests.worker.conftest import Start
from tests.worker.waiting import eventually


def get(worker: Worker, path: str = "/healthz") -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{worker.health_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.load(exc)


@pytest.fixture
def healthy(db: Database, bus: Bus) -> Worker:
    bus.queue("q", create=True)
    return Worker(db.dsn, name="one", maintain=False, health=0, grace=5)


def test_ok(healthy: Worker, bus: Bus, start: Start) -> None:
    @healthy.queue("q", max_attempts=1)
    async def handle(m: Message[Any]) -> None:
        if m.payload == "bad":
            raise ValueError

    start(healthy)
    for payload in ("good", "bad"):
        bus.queue("q").send(payload)
    eventually(lambda: get(healthy)[1]["subscriptions"][0]["failed"] == 1, "handled")
    code, report = get(healthy)
    assert (code, report["status"], report["name"], report["maintainer"]) == (200, "ok", "one", False)
    [part] = report["subscriptions"]
    assert part["name"] == "q"
    assert (part["handled"], part["failed"], part["at_work"], part["problem"]) == (1, 1, 0, None)
    assert 0 <= part["last_fetch_seconds"] < 30
    assert get(healthy, "/")[0] == 200
    assert get(healthy, "/healthz?verbose")[0] == 200


def test_other_paths(healthy: Worker, start: Start) -> None:
    @healthy.queue("q")
    async def handle(m: Message[Any]) -> None: ...

    start(healthy)
    assert get(healthy, "/metrics") == (404, {"status": "not found"})


def test_database_that_is_away(
    healthy: Worker, server_dsn: str, db: Database, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_health, "LATE", 0.3)

    @healthy.queue("q")
    async def handle(m: Message[Any]) -> None: ...

    start(healthy)
    eventually(lambda: get(healthy)[0] == 200, "well")
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        allow = sql.SQL("alter database {} allow_connections {}")
        conn.execute(allow.format(sql.Identifier(db.name), sql.SQL("false")))
        conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (db.name,))
        eventually(lambda: get(healthy)[0] == 503, "late")
        assert get(healthy)[1]["status"] == "late"
        conn.execute(allow.format(sql.Identifier(db.name), sql.SQL("true")))
    eventually(lambda: get(healthy)[0] == 200, "and well again")


def test_busy_is_not_late(healthy: Worker, bus: Bus, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken by handlers that need their time: nothing is asked for, and nothing is wrong."""
    monkeypatch.setattr(_health, "LATE", 0.5)
    begun, go = threading.Event(), threading.Event()

    @healthy.queue("q", prefetch=2, lease=3600)
    def handle(m: Message[Any]) -> None:
        begun.set()
        assert go.wait(30)

    start(healthy)
    bus.queue("q").send_batch([1, 2, 3])
    assert begun.wait(30)
    time.sleep(1)  # longer than what is late
    assert get(healthy)[0] == 200
    go.set()


def test_starting(start: Start) -> None:
    worker = Worker("host=127.0.0.1 port=1 connect_timeout=2", maintain=False, health=0)

    @worker.queue("q")
    async def handle(m: Message[Any]) -> None: ...

    running = start(worker, wait=False)
    eventually(lambda: worker._health is not None and worker._health._server is not None, "it listens")
    assert get(worker)[0] == 503
    assert get(worker)[1]["status"] == "starting"
    running.stop()


def test_stopping(healthy: Worker, bus: Bus, start: Start) -> None:
    begun, go = threading.Event(), threading.Event()

    @healthy.queue("q")
    def handle(m: Message[Any]) -> None:
        begun.set()
        assert go.wait(30)

    running = start(healthy)
    bus.queue("q").send(1)
    assert begun.wait(30)
    healthy.stop()
    eventually(lambda: get(healthy) == (503, get(healthy)[1]), "no more work for this one")
    assert get(healthy)[1]["status"] == "stopping"
    go.set()
    running.join()


def test_clients_that_say_nothing_or_nonsense(healthy: Worker, start: Start) -> None:
    @healthy.queue("q")
    async def handle(m: Message[Any]) -> None: ...

    running = start(healthy)
    assert healthy.health_port is not None
    with socket.create_connection(("127.0.0.1", healthy.health_port)) as silent:
        with socket.create_connection(("127.0.0.1", healthy.health_port)) as rude:
            rude.sendall(b"\xff" * 200_000 + b"\r\n\r\n")
        assert get(healthy)[0] == 200
        assert running.stop() < 5
        silent.close()


@pytest.mark.parametrize("where", ["here", "host:port", "99999", "1.2.3.4:"])
def test_ports_that_are_none(db: Database, start: Start, where: str) -> None:
    worker = Worker(db.dsn, health=where)

    @worker.queue("q", create=True)
    async def handle(m: Message[Any]) -> None: ...

    with pytest.raises(BadArgument, match="health must be"):
        start(worker)


def test_port_that_is_taken(db: Database, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = Worker(db.dsn, health=f"127.0.0.1:{taken.getsockname()[1]}")

        @worker.queue("q", create=True)
        async def handle(m: Message[Any]) -> None: ...

        with pytest.raises(BadArgument, match="cannot listen"):
            start(worker)
