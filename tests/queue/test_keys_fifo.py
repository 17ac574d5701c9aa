"""One place a key: first in, first out, the next only when the one before it is finished or dead."""

from __future__ import annotations

import pytest

from tests.queue.work import Desk, Office, told


@pytest.fixture
def fifo(one: Desk) -> Desk:
    one.policy(concurrency=1)
    return one


def letters(*keys: str, count: int = 3) -> list[tuple[str, str]]:
    return [(f"{key}{i}", key) for i in range(1, count + 1) for key in keys]


def fill(s: Desk, *keys: str, count: int = 3) -> None:
    """a1, b1, ... a2, b2, ... in one transaction."""
    pairs = letters(*keys, count=count)
    s.send_all(*(p for p, _ in pairs), keys=[k for _, k in pairs])


def test_one_of_each_key_at_a_time_and_in_order(fifo: Desk) -> None:
    fill(fifo, "a", "b", "c")
    for i in [1, 2, 3]:
        page = fifo.receive()
        assert sorted(map(str, told(page))) == [f"a{i}", f"b{i}", f"c{i}"]
        assert fifo.receive() == []
        fifo.ack(*[m.receipt for m in page])
    assert fifo.receive() == []


def test_only_the_key_that_is_finished_goes_on(fifo: Desk) -> None:
    fill(fifo, "a", "b")
    page = {m.payload: m.receipt for m in fifo.receive()}
    fifo.ack(page["a1"])
    assert told(fifo.receive()) == ["a2"]
    fifo.give_up(page["b1"])
    assert told(fifo.receive()) == ["b2"]


def test_nack_with_a_delay_blocks_its_key(bus: Office, fifo: Desk) -> None:
    fill(fifo, "a", "b")
    for m in fifo.receive():
        fifo.give_back(m.receipt, delay=10) if m.key == "a" else fifo.ack(m.receipt)
    assert fifo.drain() == ["b2", "b3"]
    bus.wait(9.9)
    assert fifo.receive() == []
    bus.wait(0.1)
    assert [(m.payload, m.attempt) for m in fifo.receive()] == [("a1", 2)]
    bus.wait(60)
    assert fifo.drain() == ["a1", "a2", "a3"]


def test_nack_at_once_and_with_backoff(bus: Office, fifo: Desk) -> None:
    fill(fifo, "a")
    fifo.give_back(fifo.receive()[0].receipt)
    (m,) = fifo.receive()
    assert m.payload == "a1"
    fifo.give_back(m.receipt, delay=None)
    assert fifo.receive() == []
    bus.wait(10)
    assert fifo.drain() == ["a1", "a2", "a3"]


def test_lease_that_ends(bus: Office, fifo: Desk) -> None:
    """The same message again, not the next one; with no sweeper."""
    fill(fifo, "a")
    (old,) = fifo.receive(lease="10 seconds")
    bus.wait(9.9)
    assert fifo.receive() == []
    bus.wait(0.1)
    (new,) = fifo.receive()
    assert (new.payload, new.attempt) == ("a1", 2)
    with pytest.raises(Exception, match="lease lost"):
        fifo.ack(old.receipt)
    assert fifo.receive() == []
    fifo.ack(new.receipt)
    assert told(fifo.receive()) == ["a2"]


def test_extended_lease_keeps_the_key(bus: Office, fifo: Desk) -> None:
    fill(fifo, "a")
    (m,) = fifo.receive(lease="10 seconds")
    fifo.extend(m.receipt, lease="60 seconds")
    for _ in range(5):
        bus.wait(11)
        assert fifo.receive() == []
    fifo.ack(m.receipt)
    assert told(fifo.receive()) == ["a2"]


@pytest.mark.parametrize("end", ["cancel", "late ack", "attempts"])
def test_other_ends_let_the_next_one_go(bus: Office, fifo: Desk, end: str) -> None:
    fill(fifo, "a", count=2)
    fifo.alter_queue(max_attempts=1)
    (m,) = fifo.receive(lease="10 seconds")
    bus.wait(11)
    if end == "cancel":
        assert fifo.value("select postbus.cancel('q', %s)", m.id) is True
    elif end == "late ack":
        fifo.ack(m.receipt)
    assert told(fifo.receive()) == ["a2"]
    assert len(fifo.letters()) == (1 if end == "attempts" else 0)


def test_a_waiting_message_is_cancelled(fifo: Desk) -> None:
    """... one that waits for its next try, and with it the key."""
    fill(fifo, "a")
    (m,) = fifo.receive()
    fifo.give_back(m.receipt, delay=3600)
    assert fifo.value("select postbus.cancel('q', %s)", m.id) is True
    assert fifo.drain() == ["a2", "a3"]


def test_an_ack_that_is_rolled_back_frees_nothing(bus: Office, fifo: Desk) -> None:
    fill(fifo, "a")
    (m,) = fifo.receive()
    other = bus.session()
    fifo.begin().ack(m.receipt)
    assert other.receive() == []
    fifo.rollback()
    assert other.receive() == []
    fifo.begin().ack(m.receipt)
    fifo.commit()
    assert told(other.receive()) == ["a2"]


def test_two_open_claims_do_not_share_a_key(bus: Office, fifo: Desk) -> None:
    for m in "ab":
        fifo.send(f"{m}0", m)
    fifo.drain()
    fill(fifo, "a", "b")
    fifo.receive(type="none")  # takes note of them
    x, y = bus.session().begin(), bus.session().begin()
    first, second = x.receive(1), y.receive(2)
    assert len(first) == len(second) == 1
    assert {first[0].payload, second[0].payload} == {"a1", "b1"}
    x.rollback()
    y.commit()
    assert told(fifo.receive()) == told(first)


def test_an_open_claim_holds_no_other_new_key(bus: Office, fifo: Desk) -> None:
    fill(fifo, "a", "b")
    x = bus.session().begin()
    taken = told(x.receive(1))
    left = told(fifo.receive())
    x.commit()
    assert sorted(map(str, taken + left)) == ["a1", "b1"]


def test_late_commit_of_an_earlier_message(bus: Office, fifo: Desk) -> None:
    late = bus.session().begin()
    late.send("a1", "a")
    bus.wait(1)
    fifo.send("a2", "a")
    fifo.send("a3", "a")
    (m,) = fifo.receive()
    assert m.payload == "a2"
    late.commit()
    assert fifo.receive() == []
    fifo.ack(m.receipt)
    assert fifo.drain() == ["a1", "a3"]


def test_delayed_messages_of_a_key(bus: Office, fifo: Desk) -> None:
    """In order of when they are due; one that is not due yet blocks nobody."""
    fifo.send("later", "a", delay="10 seconds")
    fifo.send("now", "a")
    assert fifo.drain() == ["now"]
    bus.wait(9.9)
    assert fifo.receive() == []
    bus.wait(0.1)
    assert fifo.drain() == ["later"]


def test_type_filter_keeps_the_order(fifo: Desk) -> None:
    fifo.send_all("a1", "a2", "a3", keys=["a"] * 3, types=["x", "y", "x"])
    (m,) = fifo.receive(type="x")
    assert m.payload == "a1"
    fifo.ack(m.receipt)
    assert fifo.receive(type="x") == []  # a2 is before it
    (m,) = fifo.receive(type="y")
    fifo.ack(m.receipt)
    assert told(fifo.receive(type="x")) == ["a3"]


@pytest.mark.parametrize("max", [1, 2, 10])
def test_type_filter_finds_the_keys_that_have_it(fifo: Desk, max: int) -> None:
    """Keys whose first message is of another type do not hide the others."""
    for i in range(5):
        fifo.send(f"other {i}", f"k{i}", type="x")
    fifo.send("wanted", "z", type="y")
    assert told(fifo.receive(max, type="y")) == ["wanted"]


def test_messages_without_a_key_are_free(fifo: Desk) -> None:
    fill(fifo, "a")
    fifo.send_many(5)
    got: list[str | None] = []
    for _ in range(2):
        got += told(fifo.receive())
    assert sorted(map(str, got)) == ["a1", "m1", "m2", "m3", "m4", "m5"]


def test_the_empty_key_is_a_key(fifo: Desk) -> None:
    fifo.send_all("1", "2", keys=["", ""])
    assert told(fifo.receive()) == ["1"]


def test_redriven_messages_take_their_turn(fifo: Desk) -> None:
    fill(fifo, "a")
    fifo.give_up(fifo.receive()[0].receipt)
    (m,) = fifo.receive()
    assert m.payload == "a2"
    fifo.rows("select postbus.redrive('q')")
    assert fifo.receive() == []
    fifo.ack(m.receipt)
    assert sorted(map(str, fifo.drain())) == ["a1", "a3"]


def test_pop_takes_no_place(fifo: Desk) -> None:
    fill(fifo, "a")
    assert [told(fifo.pop()) for _ in range(4)] == [["a1"], ["a2"], ["a3"], []]


def test_many_workers_by_turns(bus: Office, fifo: Desk) -> None:
    """Random ends; whatever happens, each key is seen in its order."""
    keys = [f"k{i}" for i in range(5)]
    for i in range(8):
        for key in keys:
            fifo.send(f"{i}", key)
    fifo.alter_queue(max_attempts=100)
    finished: dict[str, list[int]] = {key: [] for key in keys}
    held: list[tuple[int, str, str, str]] = []
    for step in range(400):
        if step % 3 != 2:
            taken = [
                (step, str(m.key), str(m.payload), m.receipt) for m in fifo.receive(2, lease="20 seconds")
            ]
            for _, key, _, _ in taken:
                assert all(key != k for since, k, _, _ in held if step - since < 20), "two at once"
            held = [h for h in held if h[1] not in {k for _, k, _, _ in taken}] + taken
        elif held:
            _, key, text, receipt = held.pop(step * 7 % len(held))
            if step % 5 == 0:
                fifo.give_back(receipt, delay=step % 4)
            elif step % 7:
                fifo.ack(receipt)
                finished[key].append(int(text))
        bus.wait(1)
        if all(len(f) == 8 for f in finished.values()):
            break
    assert finished == {key: list(range(8)) for key in keys}


@pytest.mark.parametrize("last", ["of its attempts", "before it is too old"])
@pytest.mark.parametrize("places", [1, 2])
def test_a_late_heartbeat_keeps_the_place(bus: Office, s: Desk, last: str, places: int) -> None:
    """It may not go out again, and its lease has ended, but its worker is just extending it."""
    s.queue(max_attempts=1 if last == "of its attempts" else 5)
    s.policy(concurrency=places)
    for i in range(places):
        s.send(f"m{i}", key="a", ttl=None if last == "of its attempts" else "5 seconds")
    s.send("next", key="a")
    page = s.receive(lease="10 seconds")
    assert len(page) == places
    bus.wait(10)
    worker = bus.session().begin()
    worker.extend(*[m.receipt for m in page], lease="10 seconds")
    assert s.receive() == []
    worker.commit()
    assert s.receive() == []
    bus.wait(10)
    assert told(s.receive()) == ["next"]
