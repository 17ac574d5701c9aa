"""Looking and taking away: peek, in_flight, next_due, pop, cancel."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [r["payload"] for r in rows]


# peek


def test_peek_by_state(bus: Office, kind: Desk) -> None:
    kind.send_all("ready", "out", "back", "expired")
    page = {m.payload: m for m in kind.receive()}
    kind.give_back(page["ready"].receipt)
    kind.give_back(page["back"].receipt, delay=60)
    kind.send("delayed", delay="90 seconds")
    kind.extend(page["out"].receipt, lease="80 seconds")
    bus.wait(30)
    assert set(names(kind.peek("ready"))) == {"ready", "expired"}
    assert names(kind.peek("delayed")) == ["back", "delayed"]
    assert names(kind.peek("in_flight")) == ["out"]
    assert len(kind.peek()) == 5
    states = {r["payload"]: r["state"] for r in kind.peek()}
    assert states == {
        "ready": "ready", "expired": "ready", "back": "delayed", "delayed": "delayed", "out": "in_flight",
    }  # fmt: skip


def test_peek_shows_the_whole_message_and_takes_nothing(bus: Office, kind: Desk) -> None:
    number = kind.send("text", "k", type="t", headers='{"h": 1}', priority=3, ttl="1 hour", delay="5 seconds")
    (row,) = kind.peek()
    times = {k: row.pop(k)[11:19] for k in ["created_at", "due", "expires_at"]}
    assert times == {"created_at": "00:00:00", "due": "00:00:05", "expires_at": "01:00:05"}
    assert row == {
        "id": number, "state": "delayed", "type": "t", "key": "k", "payload": "text", "blob": None,
        "headers": {"h": 1},
        "priority": 3, "attempt": 0, "worker": None, "reason": None, "saved": None,
    }  # fmt: skip
    bus.wait(5)
    kind.peek()
    kind.give_back(kind.receive(worker="w")[0].receipt, reason="why", state=1)
    (row,) = kind.peek("ready")
    assert (row["attempt"], row["worker"], row["reason"], row["saved"]) == (1, None, "why", 1)
    (m,) = kind.receive(worker="w")
    assert kind.peek("in_flight")[0]["worker"] == "w"
    assert m.attempt == 2


def test_peek_pages_and_filters(kind: Desk) -> None:
    ids = kind.send_many(15)
    kind.send("keyed", "k")
    assert len(kind.peek()) == 10
    assert names(kind.peek(max=3)) == ["m1", "m2", "m3"]
    assert names(kind.peek(id=ids[4])) == ["m5"]
    assert names(kind.peek(key="k")) == ["keyed"]
    assert kind.peek("in_flight", id=ids[4]) == []
    with refused("PB003", "peek into queue 'q': unknown state 'dead'"):
        kind.peek("dead")


# in_flight


def test_in_flight(bus: Office, kind: Desk) -> None:
    kind.queue("other")
    kind.send("x", to="other")
    kind.receive(of="other")
    kind.send_many(3)
    page = kind.receive(2, lease="10 seconds", worker="w")
    rows = kind.rows(
        "select stream, \"group\", batch, messages, worker, expires_at from postbus.in_flight('q')"
    )
    end = bus.now + timedelta(seconds=10)
    assert rows == [("q", None, m.receipt, 1, "w", end) for m in page]
    assert len(kind.rows("select * from postbus.in_flight()")) == 3
    kind.ack(rows[0][2])
    bus.wait(10)
    assert kind.rows("select * from postbus.in_flight('q')") == []


# next_due


def next_due(s: Desk) -> Any:
    return s.value("select postbus.next_due('q')")


def test_next_due(bus: Office, kind: Desk) -> None:
    start = bus.now
    kind.receive()
    assert next_due(kind) is None
    kind.send("b", delay="20 seconds", priority=4)
    assert next_due(kind) == start + timedelta(seconds=20)
    kind.send("a", "k", delay="10 seconds")
    assert next_due(kind) == start + timedelta(seconds=10)
    bus.wait(10)
    assert told(kind.receive(lease="5 seconds")) == ["a"]
    assert next_due(kind) == start + timedelta(seconds=15)  # the end of a lease
    bus.wait(5)
    (m,) = kind.receive(lease="1 hour")
    assert next_due(kind) == start + timedelta(seconds=20)
    bus.wait(5)
    kind.pop()
    assert next_due(kind) == start + timedelta(seconds=3615)
    kind.ack(m.receipt)
    kind.receive()
    assert next_due(kind) is None


def test_next_due_of_a_rate(bus: Office, one: Desk) -> None:
    """When the next token is there, not when the messages were due."""
    one.policy(rate=0.1, burst=1)
    one.send_many(3, key="a")
    one.pop()
    one.receive()
    assert next_due(one) == bus.now + timedelta(seconds=10)
    bus.wait(10)
    assert len(one.pop()) == 1


def test_waiting_for_next_due_is_enough(bus: Office, kind: Desk) -> None:
    """A worker that sleeps until then, and only then looks, gets everything when it is due."""
    for i in range(8):
        kind.send(f"m{i}", f"k{i % 3}", delay=f"{i * 7 % 5} seconds", priority=i % 2)
    got: list[str | None] = []
    for _ in range(30):
        got += kind.drain(2)
        kind.receive()
        due = next_due(kind)
        if due is None:
            break
        assert due > bus.now
        bus.wait((due - bus.now).total_seconds())
    assert sorted(map(str, got)) == [f"m{i}" for i in range(8)]


# pop


def test_pop_is_at_most_once(bus: Office, kind: Desk) -> None:
    kind.send_many(4)
    page = kind.pop(2)
    assert [(m.payload, m.attempt) for m in page] == [("m1", 1), ("m2", 1)]
    assert kind.sizes() == (2, 0, 0)
    with refused("PB004"):
        kind.ack(page[0].receipt)
    bus.wait(3600)
    assert told(kind.pop()) == ["m3", "m4"]
    assert kind.pop() == []


def test_pop_by_type_and_in_order(kind: Desk) -> None:
    kind.send_all("a", "b", "c", types=["x", "y", "x"])
    assert told(kind.pop(type="x")) == ["a", "c"]
    assert told(kind.pop()) == ["b"]


def test_pop_rolled_back(kind: Desk) -> None:
    kind.send("a")
    kind.begin()
    assert told(kind.pop()) == ["a"]
    kind.rollback()
    assert told(kind.pop()) == ["a"]


# cancel


def cancel(s: Desk, number: int) -> bool:
    return bool(s.value("select postbus.cancel('q', %s)", number))


def test_cancel(bus: Office, kind: Desk) -> None:
    waiting, delayed = kind.send("waiting"), kind.send("delayed", delay="1 hour")
    assert cancel(kind, waiting)
    assert cancel(kind, delayed)
    assert not cancel(kind, waiting)
    assert kind.peek() == []
    kind.send("out")
    (m,) = kind.receive(lease="10 seconds")
    assert not cancel(kind, m.id)
    bus.wait(10)
    assert cancel(kind, m.id)  # its worker has been too slow
    with refused("PB004", "lease lost"):
        kind.ack(m.receipt)
    kind.send("back")
    (m,) = kind.receive()
    kind.give_back(m.receipt, delay=60)
    assert cancel(kind, m.id)
    assert kind.letters() == []
    assert not cancel(kind, 0)


def test_cancel_many_says_which(kind: Desk) -> None:
    ids = kind.send_many(4)
    (m,) = kind.receive(1)
    gone = kind.value("select postbus.cancel('q', %s::bigint[])", [*ids, 999999])
    assert sorted(gone) == ids[1:]
    assert kind.value("select postbus.cancel('q', '{}'::bigint[])") == []
    assert kind.ack(m.receipt) == 1


def test_cancel_is_for_one_queue_and_one_transaction(kind: Desk) -> None:
    kind.queue("other")
    number = kind.send("x", to="other")
    assert not cancel(kind, number)
    mine = kind.send("mine")
    kind.begin()
    assert cancel(kind, mine)
    kind.rollback()
    assert kind.drain() == ["mine"]
    assert kind.drain(of="other") == ["x"]


def test_cancel_leaves_what_somebody_is_just_claiming(bus: Office, kind: Desk) -> None:
    """It waits for nobody: whoever has the message keeps it, and if he lets it go it can be cancelled."""
    number = kind.send("a")
    worker, other = bus.session().begin(), bus.session()
    assert told(worker.receive()) == ["a"]
    assert cancel(other, number) is False
    worker.rollback()
    assert cancel(other, number) is True
