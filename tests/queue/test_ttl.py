"""Messages that grow too old: never delivered, always counted, kept if the queue says so."""

from __future__ import annotations

import pytest

from tests.queue.work import Desk, Office, told


def test_never_delivered_and_counted(bus: Office, kind: Desk) -> None:
    kind.send("old", "k", ttl="10 seconds")
    kind.send("older", ttl="10 seconds", delay="5 seconds")  # counts from when it is due
    kind.send("good", "k", ttl="1 hour")
    bus.wait(10)
    assert sorted(map(str, told(kind.receive()))) == ["good", "older"]
    assert kind.look()["expired"] == 1
    assert kind.letters() == []


def test_delivered_until_the_last_moment(bus: Office, kind: Desk) -> None:
    kind.send("a", ttl="10 seconds")
    bus.wait(9.999)
    assert told(kind.receive()) == ["a"]
    assert kind.look()["expired"] == 0


def test_kept_as_dead_letters_if_the_queue_says_so(bus: Office, kind: Desk) -> None:
    kind.alter_queue(keep_expired=True)
    kind.send("a", "k", ttl="10 seconds")
    bus.wait(10)
    assert kind.receive() == []
    assert kind.letters() == [("a", 0, "expired")]
    assert kind.look()["expired"] == 1
    # Back again it has no ttl: somebody wants it.
    kind.rows("select postbus.redrive('q')")
    bus.wait(3600)
    assert told(kind.receive()) == ["a"]


def test_not_delivered_again_when_it_grew_too_old_in_the_meantime(bus: Office, kind: Desk) -> None:
    kind.send_all("nacked", "died", ttl="10 seconds")
    for m in kind.receive(lease="5 seconds"):
        if m.payload == "nacked":
            kind.give_back(m.receipt, delay=8)
    bus.wait(11)
    assert kind.receive() == []
    assert kind.look()["expired"] == 2


def test_its_worker_may_still_finish_it(bus: Office, kind: Desk) -> None:
    kind.send("a", ttl="1 second")
    (m,) = kind.receive()
    bus.wait(5)
    kind.maintain()
    assert kind.ack(m.receipt) == 1
    assert kind.look()["expired"] == 0


@pytest.mark.parametrize("keep", [False, True])
def test_upkeep_buries_without_claims(bus: Office, kind: Desk, keep: bool) -> None:
    kind.alter_queue(keep_expired=keep)
    kind.send_all("a", "b", ttl="10 seconds")
    kind.send("out", ttl="10 seconds", priority=9)
    assert told(kind.receive(1)) == ["out"]
    kind.send("fresh", ttl="1 hour")
    assert "expired" not in kind.maintain()
    bus.wait(10)
    assert kind.maintain()["expired"] == 2  # not what is out with a worker
    assert kind.look()["expired"] == 2
    assert kind.letters() == ([("a", 0, "expired"), ("b", 0, "expired")] if keep else [])
    bus.wait(30)
    assert kind.maintain()["expired"] == 1
    assert kind.drain() == ["fresh"]


def test_upkeep_frees_the_key(bus: Office, one: Desk) -> None:
    """A key's only place, held by a message that waits for its next try and grows too old."""
    one.policy(concurrency=1)
    one.send("first", "k", ttl="10 seconds")
    one.send("second", "k")
    one.give_back(one.receive()[0].receipt, delay=3600)
    bus.wait(11)
    assert one.receive() == []
    assert one.maintain()["expired"] == 1
    assert told(one.receive()) == ["second"]


def test_counts_are_added_up(bus: Office, one: Desk) -> None:
    one.send_all(*map(str, range(150)), ttl="1 second")
    bus.wait(1)
    assert one.receive() == []
    one.maintain()
    assert one.value("select count(*) from postbus.tally") == 1
    assert one.look()["expired"] == 150


def test_many_too_old_ones_do_not_hide_a_good_one(bus: Office, kind: Desk) -> None:
    kind.send_all(*map(str, range(300)), ttl="1 second")
    bus.wait(1)
    kind.send("good")
    assert told(kind.receive(1)) == ["good"]
