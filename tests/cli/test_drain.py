"""Drain: finish or move what is in a queue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Cli, Start
from tests.conftest import Database

KEPT = ("type", "key", "payload", "blob", "headers", "priority", "expires_at")


@pytest.fixture
def bus(cli: Cli) -> Cli:
    cli("queues", "create", "q")
    cli("queues", "create", "to")
    return cli


def in_order(cli: Cli, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cli.json("peek", queue, "--max", "10000")
    return found


def test_drain_finishes_what_is_due(bus: Cli) -> None:
    bus("queues", "alter", "q", "--on-ack", "archive")
    bus("send", "q", "--lines", input="\n".join(str(n) for n in range(2500)))
    bus("send", "q", "later", "--delay", "1 hour")
    [held] = bus.lines("receive", "q")
    assert bus("drain", "q") == "finished 2499 of queue q\n"
    assert [m["state"] for m in bus.json("peek", "q")] == ["in_flight", "delayed"]
    assert len(bus.json("archived", "q", "--max", "9999")) == 2499
    bus("ack", held["receipt"])


def test_drain_says_what_is_left(bus: Cli, start: Start) -> None:
    bus("send", "q", "x")
    bus("send", "q", "later", "--delay", "1 hour")
    bus("pause", "q")
    out, err = start(bus.dsn, "drain", "q").communicate(timeout=30)
    assert out == "finished 0 of queue q\n"
    assert err == "postbus: left in queue q: 1 ready, 1 delayed\n"


def test_move_keeps_envelope_order_due_time_and_expiry(bus: Cli, db: Database) -> None:
    conn = db.connect()
    # One transaction, so that equal due times leave the order to the ids; runs of every length.
    conn.execute(
        """select count(postbus.send('q', 'm' || i, type => 't' || i % 4, key => 'k' || i % 3,
          headers => case when i % 5 = 0 then '{"n": 1.10}'::jsonb end, priority => i % 2,
          ttl => case when i % 7 < 3 then interval '1 hour' end,
          deliver_at => case when i % 10 = 0 then now() + interval '1 day' + i * interval '1 s' end))
        from generate_series(1, 200) i"""
    )
    conn.execute("select postbus.send('q', '\\x00ff'::bytea)")
    before = in_order(bus, "q")
    assert bus("drain", "q", "--to", "to") == "moved 201 of queue q to to\n"
    after = in_order(bus, "to")
    assert in_order(bus, "q") == []
    assert len(after) == len(before) == 201
    for old, new in zip(before, after, strict=True):
        assert [old[k] for k in KEPT[:-1]] == [new[k] for k in KEPT[:-1]]
        assert (old["expires_at"] is None) == (new["expires_at"] is None)
        assert old["state"] == new["state"]
        if old["state"] == "delayed":
            assert (old["due"], old["expires_at"]) == (new["due"], new["expires_at"])
    stored = "select headers::text from postbus.peek('to', max => 300) where headers is not null"
    assert set(conn.execute(stored).fetchall()) == {('{"n": 1.10}',)}


def test_move_leaves_what_expired_and_what_is_out(bus: Cli, db: Database) -> None:
    conn = db.connect()
    bus("send", "q", "out")
    bus("receive", "q")
    conn.execute("set postbus.fake_now = '2020-01-01'")
    conn.execute("select count(postbus.send('q', 'old', ttl => '1 hour')) from generate_series(1, 6000)")
    bus("send", "q", "fresh")
    assert bus("drain", "q", "--to", "to") == "moved 1 of queue q to to\n"
    assert [m["payload"] for m in bus.json("peek", "to")] == ["fresh"]
    left = bus.json("queues")[0]
    assert (left["ready"], left["in_flight"]) == (6000, 1)


def test_move_of_many_pages(bus: Cli, db: Database) -> None:
    db.connect().execute(
        "select postbus.send_batch('q', array_agg(i::text)) from generate_series(1, 12000) i"
    )
    assert bus("drain", "q", "--to", "to") == "moved 12000 of queue q to to\n"
    moved = [int(m["payload"]) for m in bus.lines("pop", "to", "--max", "12000")]
    assert moved == list(range(1, 12001))


def test_target_must_be_there_and_have_room(bus: Cli) -> None:
    assert "'nowhere' does not exist" in bus("drain", "q", "--to", "nowhere", code=1)
    bus("send", "q", "--lines", input="a\nb\n")
    bus("queues", "alter", "to", "--max-size", "1")
    assert "is full" in bus("drain", "q", "--to", "to", code=1)
    assert [m["payload"] for m in bus.json("peek", "q")] == ["a", "b"]
    assert bus.json("peek", "to") == []


def test_wait_until_the_queue_is_empty(bus: Cli, start: Start) -> None:
    bus("send", "q", "now")
    bus("send", "q", "soon", "--delay", "0.3")
    bus("send", "q", "out")
    [held] = bus.lines("receive", "q", "--lease", "1 hour")
    process = start(bus.dsn, "drain", "q", "--wait")
    assert held["payload"] == "now"
    bus("nack", held["receipt"], "--delay", "0.5")
    out, err = process.communicate(timeout=30)
    assert (out, err) == ("finished 3 of queue q\n", "")
    assert bus.json("peek", "q") == []
