"""Receiving: order, leases, filters, late commits, and polls that find nothing."""

from __future__ import annotations

import pytest

from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told


def test_oldest_first_and_at_most_max(bus: Office, kind: Desk) -> None:
    for i in range(5):
        kind.send(f"m{i}")
        bus.wait(1)
    assert told(kind.receive(2)) == ["m0", "m1"]
    assert told(kind.receive(2)) == ["m2", "m3"]
    assert told(kind.receive(2)) == ["m4"]
    assert kind.receive(2) == []


def test_one_transaction_is_first_in_first_out(bus: Office, kind: Desk) -> None:
    """By real time, which moves on while the transaction is open: what it sends is due at once as a whole."""
    producer = bus.session()
    producer.value("select set_config('postbus.fake_now', '', false)")
    producer.begin()
    for i in range(1, 21):
        producer.send(f"m{i}")
    producer.send_all("m21", "m22")
    producer.rows("commit")
    both = "(table postbus.queued union all table postbus.queued_unlogged)"
    assert producer.value(f"select count(distinct due) from {both} x") == 1
    expected = [f"m{i}" for i in range(1, 23)]
    assert producer.drain(7) == expected


def test_the_clock_goes_backwards_between_transactions(bus: Office, kind: Desk) -> None:
    """Nothing is lost, and what is due is found; it may wait until the clock is there again."""
    kind.send("at ten")
    bus.wait(-10)
    kind.send("at zero")
    assert told(kind.receive()) == ["at zero"]
    bus.wait(10)
    assert told(kind.receive()) == ["at ten"]


def test_lease_ends_without_a_sweeper(bus: Office, kind: Desk) -> None:
    kind.send("a")
    (first,) = kind.receive(lease="10 seconds")
    bus.wait(9.9)
    assert kind.receive() == []
    bus.wait(0.1)
    (second,) = kind.receive()
    assert (second.id, second.payload, second.attempt) == (first.id, "a", 2)
    assert second.receipt != first.receipt
    bus.wait(29.9)  # the lease of the queue
    assert kind.receive() == []
    bus.wait(0.1)
    assert [m.attempt for m in kind.receive()] == [3]


def test_what_was_out_comes_after_what_waited_longer(bus: Office, kind: Desk) -> None:
    """An expired lease is due from its end on."""
    kind.send("died")
    kind.receive(lease="10 seconds")
    bus.wait(5)
    kind.send("waited")
    bus.wait(6)
    kind.send("new")
    assert told(kind.receive()) == ["waited", "died", "new"]


def test_each_message_to_one_receiver(bus: Office, kind: Desk) -> None:
    """Two claims that have not committed yet do not share, and do not wait for each other."""
    kind.send_many(6)
    a, b = bus.session().begin(), bus.session().begin()
    first = told(a.receive(2))
    second = told(b.receive(2))
    assert (first, second) == (["m1", "m2"], ["m3", "m4"])
    a.rollback()
    b.commit()
    assert told(kind.receive()) == ["m1", "m2", "m5", "m6"]


def test_a_rolled_back_claim_costs_no_attempt(kind: Desk) -> None:
    kind.send("a")
    kind.begin()
    (m,) = kind.receive()
    kind.rollback()
    with refused("PB004", "lease lost"):
        kind.ack(m.receipt)
    assert [x.attempt for x in kind.receive()] == [1]


def test_type_filter(kind: Desk) -> None:
    for i in range(1, 7):
        kind.send(f"m{i}", type="even" if i % 2 == 0 else "odd")
    assert told(kind.receive(2, type="even")) == ["m2", "m4"]
    assert kind.receive(type="none of it") == []
    assert told(kind.receive()) == ["m1", "m3", "m5", "m6"]


def test_what_commits_late_is_found(bus: Office, kind: Desk) -> None:
    """Its id and its due time are those of before others were taken and finished."""
    late = bus.session().begin()
    late.send("late")
    bus.wait(1)
    for i in range(3):
        kind.send(f"m{i}")
        assert kind.drain() == [f"m{i}"]
    bus.wait(60)
    late.commit()
    assert kind.drain() == ["late"]


def test_late_commit_behind_a_mark(bus: Office, one: Desk) -> None:
    """An old snapshot keeps dead entries, so claims begin at a mark; they look behind it every second."""
    one.send("urgent", priority=1)  # several priorities: every claim measures its walk
    late = bus.session().begin()
    late.send("late")
    old = bus.session().begin("repeatable read")
    one.send_many(6000)
    one.drain(10_000)
    bus.wait(10)
    assert one.receive() == []
    assert one.value("select count(*) from postbus.mark") > 0
    late.commit()
    one.send("new")
    assert one.drain() == ["new"]
    bus.wait(1.1)
    assert one.drain() == ["late"]
    old.commit()


def test_worker_is_remembered(kind: Desk) -> None:
    kind.send_many(2)
    kind.receive(1, worker="w 1")
    kind.receive(1)
    rows = kind.rows("select worker from postbus.in_flight('q') order by batch")
    assert rows == [("w 1",), (None,)]


def test_a_poll_that_finds_nothing_is_read_only(bus: Office, kind: Desk) -> None:
    """No xid, no lock that stays: with delayed and leased messages there, and with nothing."""
    kind.send("later", "k", delay="1 hour")
    kind.send("out", "l")
    kind.receive()
    kind.receive()  # a keyed queue takes note of its wakes once
    worker = bus.session().begin()
    for _ in range(30):
        assert worker.receive() == []
        assert worker.receive(type="other") == []
        worker.rows("select postbus.next_due('q'), (select count(*) from postbus.peek('q'))")
    assert worker.value("select pg_current_xact_id_if_assigned()") is None
    locks = "select locktype, mode from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'"
    assert worker.rows(locks) == []
    worker.commit()
    kind.rows("select postbus.pause('q')")
    bus.wait(7200)
    worker.begin()
    assert worker.receive() == []
    assert worker.value("select pg_current_xact_id_if_assigned()") is None
    worker.commit()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_needs_read_committed(s: Desk, level: str) -> None:
    s.queue()
    s.send("x")
    for call in ["receive", "pop"]:
        s.begin(level)
        with refused("PB003", f"{call} needs READ COMMITTED, this transaction is {level.upper()}"):
            s.rows(f"select * from postbus.{call}('q')")
        s.rollback()
    s.begin("read uncommitted")  # which is READ COMMITTED in PostgreSQL
    assert told(s.receive()) == ["x"]
    s.commit()


def test_bad_arguments(kind: Desk) -> None:
    kind.send("x")
    for call in ["receive", "pop"]:
        for wrong in ["0", "-1", "10001", "null"]:
            with refused("PB003", f"{call} from queue 'q': max must be from 1 to 10000, not {wrong}"):
                kind.rows(f"select * from postbus.{call}('q', {wrong})")
    for lease in ["0", "-1 second", "2000 years"]:
        with refused("PB003", "receive from queue 'q' needs a lease"):
            kind.receive(lease=lease)
    assert told(kind.receive()) == ["x"]


def test_max_of_ten_thousand(one: Desk) -> None:
    one.rows(
        "select postbus.send_batch('q',"
        " array(select i::text from generate_series(1, 10500) i order by i::int))"
    )
    page = one.receive(10_000)
    assert told(page) == [str(i) for i in range(1, 10_001)]
    assert one.ack(*[m.receipt for m in page]) == 10_000
    assert one.sizes() == (500, 0, 0)
