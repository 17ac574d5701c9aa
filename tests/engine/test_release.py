"""Release in streams: what was taken but not begun comes again first, in order, and does not count."""

from __future__ import annotations

import pytest

from tests.engine.bus import Bus, Session, payloads, refused
from tests.engine.test_leases import ORDERINGS, one_stream, state


def release(s: Session, *receipts: str) -> int:
    return int(s.value("select postbus.release(%s::text[])", list(receipts)))


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_whole_batch(s: Session, ordering: str) -> None:
    one_stream(s, ordering, 5)
    page = s.consume(3)
    assert s.value("select postbus.release(%s::text)", page[0].batch) == 3
    for receipt in [page[0].batch, page[1].receipt]:
        before = state(s)
        with refused("PB004", "Nothing was changed"):
            release(s, receipt)
        assert state(s) == before
    again = s.consume(3)
    assert [(m.payload, m.attempt, m.id) for m in again] == [(m.payload, 1, m.id) for m in page]
    s.ack(again[0].batch)
    assert s.take() == ["e4", "e5"]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_never_too_often(bus: Bus, s: Session, ordering: str) -> None:
    one_stream(s, ordering, 2, max_attempts=2)
    for _ in range(5):
        page = s.consume()
        assert [(m.payload, m.attempt) for m in page] == [("e1", 1), ("e2", 1)]
        assert release(s, *(m.receipt for m in page)) == 2
    s.nack(s.consume()[0].batch, reason="no luck", delay=0)
    seen: list[tuple[str | None, int]] = []
    for _ in range(10):
        page = s.consume()
        seen += [(m.payload, m.attempt) for m in page]
        release(s, page[0].batch)
    assert set(seen) <= {("e1", 2), ("e2", 2)}
    assert s.rows("select distinct reason from postbus.redelivery where attempt = 1") == [("no luck",)]
    assert s.rows("select * from postbus.dead_letter") == []


def test_the_whole_envelope(s: Session) -> None:
    one_stream(s)
    s.publish("text", "k", type="t", headers='{"h": [1]}')
    s.rows("select postbus.publish('s', '\\x0001ff'::bytea, 'b', 'l', '{}')")
    first = s.consume()
    release(s, first[0].batch)

    def envelope(m: object) -> list[object]:
        return [v for name, v in vars(m).items() if name not in ("receipt", "batch")]

    assert [envelope(m) for m in s.consume()] == [envelope(m) for m in first]


def test_later_messages_of_the_key_go_back_too(s: Session) -> None:
    one_stream(s)
    for payload in ["a1", "b1", "a2", "b2", "a3"]:
        s.publish(payload, payload[0])
    page = {m.payload: m for m in s.consume()}
    assert release(s, page["a2"].receipt) == 1
    for payload in ["a2", "a3"]:
        with refused("PB004"):
            s.ack(page[payload].receipt)
    s.publish("a4", "a")
    assert s.consume() == []  # a1 is out
    assert s.ack(*(page[p].receipt for p in ["a1", "b1", "b2"])) == 3
    again = s.consume()
    assert [(m.payload, m.attempt) for m in again] == [("a2", 1), ("a3", 1)]
    s.publish("b3", "b")
    s.ack(again[0].batch)
    assert s.take() == ["a4", "b3"]


def test_messages_without_a_key_have_no_order(s: Session) -> None:
    one_stream(s, count=3)
    page = s.consume()
    assert release(s, page[0].receipt) == 1
    assert s.ack(page[1].receipt, page[2].receipt) == 2
    assert s.take() == ["e1"]


def test_total_order(s: Session) -> None:
    one_stream(s, "stream", 6)
    page = s.consume(4)
    assert s.ack(page[0].receipt) == 1
    assert release(s, page[1].receipt) == 1
    for m in page[2:]:
        with refused("PB004"):
            s.ack(m.receipt)
    assert [(m.payload, m.attempt) for m in s.consume()] == [("e2", 1), ("e3", 1), ("e4", 1)]
    s.ack(s.value("select batch from postbus.in_flight()"))
    assert s.take() == ["e5", "e6"]


def test_no_order_takes_nothing_with_it(s: Session) -> None:
    one_stream(s, "none")
    for i in range(3):
        s.publish(f"m{i}", "k")
    page = s.consume()
    assert release(s, page[0].receipt) == 1
    assert s.ack(page[1].receipt, page[2].receipt) == 2
    assert s.take() == ["m0"]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_what_waits_keeps_its_order(bus: Bus, s: Session, ordering: str) -> None:
    """A later one failed before and waits longer; what is parked behind it stays there."""
    one_stream(s, ordering)
    for i in range(6):
        s.publish(f"m{i}", "k")
    page = s.consume(5)
    s.nack(page[3].receipt, delay=10)
    release(s, page[1].receipt)
    s.ack(page[0].batch)
    again = s.consume()
    assert payloads(again) == ["m1", "m2"]
    s.ack(again[0].batch)
    assert s.consume() == []
    bus.wait(11)
    assert s.take(1) == ["m3", "m4", "m5"]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_many_and_again(s: Session, ordering: str) -> None:
    """A worker that takes much, finishes little and releases the rest; some fail in between."""
    one_stream(s, ordering, max_attempts=100)
    s.fill(200, keys=3)
    got: list[str] = []
    while page := s.consume(40):
        s.ack(page[0].receipt)
        got.append(str(page[0].payload))
        if len(got) % 4 == 1 and len(page) > 1:
            s.nack(page[1].receipt, delay=0)
        release(s, *_out(s)[:30])
    assert sorted(got, key=lambda p: int(p[1:])) == [f"e{i}" for i in range(1, 201)]
    for k in range(3):
        mine = [int(p[1:]) for p in got if int(p[1:]) % 3 == k]
        assert mine == sorted(mine)


def _out(s: Session) -> list[str]:
    """Receipts of what is on the one lease there is."""
    rows = s.rows("select token, m.id from postbus.lease l, postbus._lease_messages(l) m order by m.id")
    return [f"s{token}:{id_}" for token, id_ in rows]


def test_part_of_a_lease_that_is_extended(bus: Bus, s: Session) -> None:
    one_stream(s, "none", 4)
    page = s.consume(lease="10 seconds")
    release(s, page[3].receipt)
    s.rows("select postbus.extend(%s::text, '30 seconds')", page[0].batch)
    bus.wait(20)
    assert [(m.payload, m.attempt) for m in s.consume()] == [("e4", 1)]
    assert s.ack(page[0].batch) == 3


def test_after_the_lease_was_taken_back(bus: Bus, s: Session) -> None:
    one_stream(s, "none", 2)
    page = s.consume(lease="1 second")
    bus.wait(2)
    again = s.consume()
    with refused("PB004"):
        release(s, page[0].batch)
    assert [(m.payload, m.attempt) for m in again] == [("e1", 2), ("e2", 2)]
    release(s, again[0].batch)
    assert {m.attempt for m in s.consume()} == {2}
