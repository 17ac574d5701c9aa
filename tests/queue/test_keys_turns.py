"""How claims come to keys: what is woken is served at once, and what is ready by itself is not forgotten."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.queue.work import Desk, Office, told


@pytest.fixture
def fifo(one: Desk) -> Desk:
    one.policy(concurrency=1)
    one.receive()  # this session has looked at everything: nothing is ready
    return one


def versions(s: Desk) -> list[tuple[str, str]]:
    """Rows of key_state, as they were written."""
    return s.rows("select key, xmin::text from postbus.key_state order by key")


def cycle(s: Desk, *keys: str, lease: str = "30 seconds") -> None:
    s.send_all(*keys, keys=list(keys))
    page = s.receive(len(keys), lease=lease)
    assert sorted(map(str, told(page))) == sorted(keys)
    s.ack(*(m.receipt for m in page))


def test_a_key_that_goes_from_message_to_message_is_not_written(fifo: Desk) -> None:
    cycle(fifo, "a", "b")
    cycle(fifo, "a", "b")
    fifo.rows(
        "select set_config(x, regexp_replace(current_setting(x), '[0-9.]+', '4e9'), false)"
        " from (select 'postbus.keys_' || id from postbus.queue) q (x)"
    )  # nor is anything looked at again
    before = versions(fifo)
    for _ in range(5):
        cycle(fifo, "a", "b")
    assert versions(fifo) == before
    assert fifo.value("select count(*) from postbus.key_wake") == 2  # of the last acks


def test_its_later_lease_ends_all_the_same(bus: Office, fifo: Desk) -> None:
    """The row says when the first lease would have ended; then it is looked at once more."""
    cycle(fifo, "a", lease="30 seconds")
    bus.wait(10)
    fifo.send_all("a1", "a2", keys=["a", "a"])
    (m,) = fifo.receive(1, lease="30 seconds")
    assert m.payload == "a1"
    bus.wait(25)
    assert fifo.receive() == []
    bus.wait(4.9)
    assert fifo.receive() == []
    bus.wait(0.1)
    assert [(m.payload, m.attempt) for m in fifo.receive()] == [("a1", 2)]


def test_a_shorter_lease_ends_in_time(bus: Office, fifo: Desk) -> None:
    cycle(fifo, "a", lease="1 hour")
    fifo.send("a1", "a")
    assert told(fifo.receive(1, lease="10 seconds")) == ["a1"]
    bus.wait(10)
    assert [(m.payload, m.attempt) for m in fifo.receive(1)] == [("a1", 2)]


def test_a_new_message_for_a_key_that_was_let_be(bus: Office, fifo: Desk) -> None:
    """Its row says that it is blocked, which it no longer is: the wake of the ack says so."""
    for i in range(3):
        cycle(fifo, "a")
        bus.wait(1)
        fifo.send(f"a{i}", "a")
        assert told(fifo.receive(1)) == [f"a{i}"]
        fifo.send("behind", "a")
        assert fifo.receive(1) == []
        (batch,) = fifo.rows("select batch from postbus.in_flight('q')")
        fifo.ack(batch[0])
        assert told(fifo.receive(1)) == ["behind"]
        (batch,) = fifo.rows("select batch from postbus.in_flight('q')")
        fifo.ack(batch[0])


@pytest.mark.parametrize("limits", [{"concurrency": 1}, {"concurrency": 2}, {}])
def test_what_is_ready_by_itself_comes_in_between(bus: Office, one: Desk, limits: dict[str, Any]) -> None:
    """A lease has ended, which wakes nobody; every claim finds as many keys that were woken as it takes."""
    one.policy(**limits)
    one.send("lost", "z")
    assert told(one.receive(1, lease="1 second")) == ["lost"]
    assert one.receive() == []
    bus.wait(2)
    end = time.monotonic() + 5
    got: list[str | None] = []
    while "lost" not in got and time.monotonic() < end:
        one.send("busy", f"a{len(got) % 3}")
        (m,) = one.receive(1)
        got.append(m.payload)
        one.ack(m.receipt)
    assert "lost" in got


@pytest.mark.parametrize("limits", [{"concurrency": 1}, {}])
def test_messages_without_a_key_come_in_between(one: Desk, limits: dict[str, Any]) -> None:
    """They wake nobody either."""
    one.policy(**limits)
    one.receive()
    one.send("free")
    end = time.monotonic() + 5
    got: list[str | None] = []
    while "free" not in got and time.monotonic() < end:
        one.send("busy", f"a{len(got) % 3}")
        (m,) = one.receive(1)
        got.append(m.payload)
        one.ack(m.receipt)
    assert "free" in got


def test_no_more_than_asked_for(one: Desk) -> None:
    """Some with a key and some without, in either order."""
    one.policy(concurrency=1)
    for _ in range(30):
        one.send_all(*["m"] * 8, keys=[*"abcd", None, None, None, None])
        page = one.receive(5)
        assert len(page) == 5
        one.ack(*(m.receipt for m in page))
        assert len(one.drain()) == 3


@pytest.mark.parametrize("many", [False, True])
def test_ack_of_a_key_with_an_archive(s: Desk, many: bool) -> None:
    """A place to free, and a copy to keep."""
    s.queue(on_ack="archive")
    s.policy(concurrency=1)
    s.send_all("a1", "b1", "a2", keys=["a", "b", "a"])
    receipts = [m.receipt for m in s.receive()]
    if many:
        assert s.ack(*receipts) == 2
    else:
        assert [s.ack(r) for r in receipts] == [1, 1]
    assert told(s.receive()) == ["a2"]
    assert s.value("select count(*) from postbus.archived('q')") == 2


def test_a_key_that_has_waited_for_longer_than_the_session_remembers(bus: Office, one: Desk) -> None:
    """The session knows from when on there are ready keys; a wake tells of one that was before that."""
    one.policy()
    one.send_all("a1", "a2", "b1", keys=["a", "a", "b"])
    bus.wait(5)
    assert told(one.receive(1)) == ["a1"]
    assert sorted(map(str, told(one.receive()))) == ["a2", "b1"]
