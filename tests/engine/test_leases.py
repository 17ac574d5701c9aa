"""Leases: what is handed out is finished once, given back, or comes again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.bus import Bus, Message, Session, payloads, refused

ORDERINGS = ["stream", "key", "none"]


def state(s: Session) -> list[Any]:
    """Everything that a refused call must leave as it was."""
    return [
        s.rows(f"select t::text from postbus.{table} t order by 1")
        for table in ["lease", "redelivery", "progress", "dead_letter"]
    ]


def one_stream(s: Session, ordering: str = "key", count: int = 0, **options: Any) -> None:
    s.stream()
    s.group(ordering=ordering, **{"backoff": 0, **options})
    if count:
        s.fill(count)


# Paging and acknowledging.


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_pages_of_a_window_deliver_everything_once(s: Session, ordering: str, lanes: int) -> None:
    """An ack moves past what was returned, not past the whole window."""
    s.stream(lanes=lanes)
    s.group(ordering=ordering)
    s.fill(1200, keys=17)
    seen: list[int] = []
    while page := s.consume(500):
        assert len(page) <= 500
        assert s.ack(page[0].batch) == len(page)
        seen += [m.id for m in page]
    assert len(seen) == 1200
    assert sorted(seen) == list(range(1, 1201))
    if ordering == "stream" or lanes == 1:
        assert seen == sorted(seen)


def test_pages_of_one_window_can_be_out_together(s: Session) -> None:
    """Ordering none: the second page does not wait for the first, and neither gets the other's."""
    one_stream(s, "none", 1200)
    first, second, third = s.consume(500), s.consume(500), s.consume(500)
    assert [len(p) for p in (first, second, third)] == [500, 500, 200]
    assert s.consume(500) == []
    assert len({m.id for m in first + second + third}) == 1200
    for page in (second, third, first):
        assert s.ack(page[0].batch) == len(page)
    assert s.figures()["in_flight"] == 0


@pytest.mark.parametrize("whole", [True, False])
def test_every_form_of_ack(s: Session, whole: bool) -> None:
    one_stream(s, "none", 9)
    a, b, c = s.consume(3), s.consume(3), s.consume(3)
    assert s.ack(a[0].receipt) == 1
    assert s.value("select postbus.ack(%s, %s::bigint[])", b[0].batch, [b[0].id, b[2].id]) == 2
    # A batch, messages of another and a message of a third in one call.
    rest = [a[0].batch] if whole else [m.receipt for m in a[1:]]
    assert s.ack(*rest, b[1].receipt, c[0].receipt, c[1].receipt) == 5
    assert s.ack(c[0].batch) == 1
    assert s.figures()["in_flight"] == 0
    assert s.consume() == []


def test_ack_of_ids_takes_any_receipt_of_the_batch(s: Session) -> None:
    one_stream(s, count=3)
    page = s.consume()
    assert s.value("select postbus.ack(%s, %s::bigint[])", page[0].receipt, [m.id for m in page]) == 3


def test_ack_of_nothing(s: Session) -> None:
    assert s.value("select postbus.ack('{}'::text[])") == 0


@pytest.mark.parametrize("verb", ["ack", "nack", "extend", "dead_letter"])
def test_wrong_receipts_change_nothing(s: Session, verb: str) -> None:
    """Not even for the good receipts in the same call."""
    one_stream(s, "none", 6)
    done, good = s.consume(3), s.consume(3)
    s.ack(done[0].batch)
    cases = {
        "finished": (done[0].receipt, "PB004"),
        "finished batch": (done[0].batch, "PB004"),
        "unknown": ("s999999:1", "PB004"),
        "foreign id": (f"{good[0].batch}:{done[0].id}", "PB004"),
        "malformed": ("x1:1", "PB003"),
        "unknown in a queue": ("q1:1:0:1", "PB004"),
        "empty": ("", "PB003"),
        "null": (None, "PB003"),
    }
    if verb == "extend":
        del cases["foreign id"]  # a heartbeat is for the whole batch
    before = state(s)
    for wrong, sqlstate in cases.values():
        with refused(sqlstate, "receipt" if sqlstate == "PB003" else "lost"):
            s.rows(f"select postbus.{verb}(%s::text[])", [good[1].receipt, wrong])
        assert state(s) == before
    assert s.ack(good[0].batch) == 3


def test_same_message_twice_in_one_ack(s: Session) -> None:
    """It counts once or is refused; what it never does is finish a neighbour."""
    one_stream(s, count=3)
    page = s.consume()
    s.ack(page[0].receipt, page[0].receipt)
    assert s.figures()["in_flight"] == 2
    assert s.ack(page[0].batch) == 2


# Expiry.


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_expiry_brings_the_unfinished_rest_again(bus: Bus, s: Session, ordering: str) -> None:
    one_stream(s, ordering, 5)
    page = s.consume(lease="30 seconds")
    assert s.ack(page[1].receipt, page[3].receipt) == 2
    bus.wait(29)
    assert s.consume() == []
    bus.wait(2)
    again = bus.session().consume()
    assert payloads(again) == ["e1", "e3", "e5"]
    assert {m.attempt for m in again} == {2}
    assert [m.id for m in again] == [page[i].id for i in (0, 2, 4)]
    with refused("PB004"):
        s.ack(page[0].batch)
    with refused("PB004"):
        s.ack(page[0].receipt)
    assert s.ack(again[0].batch) == 3
    assert s.consume() == []


def test_late_ack_counts_while_nobody_took_over(bus: Bus, s: Session) -> None:
    one_stream(s, count=2)
    page = s.consume(lease="1 second")
    bus.wait(60)
    assert s.ack(page[0].batch) == 2
    assert s.consume() == []


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_extend_keeps_a_lease(bus: Bus, s: Session, ordering: str) -> None:
    one_stream(s, ordering, 2)
    page = s.consume(lease="10 seconds")
    for _ in range(4):
        bus.wait(8)
        assert s.consume() == []
        until = s.value("select postbus.extend(%s::text, '10 seconds')", page[0].batch)
        assert (until - bus.now).total_seconds() == 10
    bus.wait(11)
    again = s.consume()
    assert payloads(again) == ["e1", "e2"]
    with refused("PB004", "lost"):
        s.rows("select postbus.extend(%s::text)", page[0].batch)


def test_extend_takes_the_lease_of_the_group(bus: Bus, s: Session) -> None:
    one_stream(s, count=1, lease="7 seconds")
    page = s.consume()
    bus.wait(5)
    assert (s.value("select postbus.extend(%s::text)", page[0].receipt) - bus.now).total_seconds() == 7
    for bad in ["0 seconds", "-1 second"]:
        with refused("PB003", "longer than zero"):
            s.rows("select postbus.extend(%s::text, %s::interval)", page[0].receipt, bad)


@pytest.mark.parametrize("bad", [{"max": 0}, {"max": -1}, {"max": None}, {"max": 100001}, {"lease": "0 s"}])
def test_consume_refuses_nonsense(s: Session, bad: dict[str, Any]) -> None:
    one_stream(s, count=1)
    with refused("PB003", "max must be"):
        s.consume(bad.get("max", 1), **{k: v for k, v in bad.items() if k != "max"})


# Giving back.


def test_nack_waits_for_its_delay(bus: Bus, s: Session) -> None:
    one_stream(s, "none", 2)
    page = s.consume()
    assert s.nack(page[0].receipt, delay=10, reason="no luck") == 1
    assert s.rows("select event.reason from postbus.redelivery event") == [("no luck",)]
    assert s.figures()["waiting"] == 1
    bus.wait(9.9)
    assert s.consume() == []
    bus.wait(0.2)
    again = s.consume()
    assert [(m.payload, m.attempt, m.id) for m in again] == [("e1", 2, page[0].id)]
    assert s.ack(again[0].receipt, page[1].receipt) == 2


def test_redelivery_carries_the_whole_envelope(s: Session) -> None:
    one_stream(s)
    s.publish("text", "k", type="t", headers='{"h": [1]}')
    s.rows("select postbus.publish('s', '\\x0001ff'::bytea, 'b', 'l', '{}')")
    first = s.consume()
    s.nack(first[0].batch, delay=0)
    again = s.consume()

    def envelope(m: Message) -> tuple[Any, ...]:
        return (m.id, m.type, m.key, m.payload, m.blob, m.headers, m.created_at)

    assert [envelope(m) for m in again] == [envelope(m) for m in first]


def test_backoff_doubles_up_to_its_bound(bus: Bus, s: Session) -> None:
    s.stream()
    s.group(ordering="none", backoff=4, max_backoff=50)
    s.fill(20)
    for attempt in range(1, 8):
        batches = []
        while page := s.consume(7):
            assert {m.attempt for m in page} == {attempt}
            batches.append(page[0].batch)
        s.nack(*batches)
        delays = [(due - bus.now).total_seconds() for (due,) in s.rows("select due from postbus.redelivery")]
        middle = min(4 * 2 ** (attempt - 1), 50)
        assert len(delays) == 20
        assert all(0.75 * middle <= d <= 1.25 * middle for d in delays), (attempt, delays)
        assert len(set(delays)) > 10, "no jitter"
        bus.wait(63)


def test_negative_delay_is_no_delay(s: Session) -> None:
    one_stream(s, count=1)
    s.nack(s.consume()[0].receipt, delay=-5)
    assert [m.attempt for m in s.consume()] == [2]


# Order under failure.


def test_nack_takes_later_messages_of_the_key_back(bus: Bus, s: Session) -> None:
    one_stream(s)
    for payload in ["a1", "b1", "a2", "b2", "a3"]:
        s.publish(payload, payload[0])
    page = {m.payload: m for m in s.consume()}
    assert s.nack(page["a1"].receipt, delay=10) == 1
    for payload in ["a1", "a2", "a3"]:
        with refused("PB004"):
            s.ack(page[payload].receipt)
    assert s.ack(page["b1"].receipt, page["b2"].receipt) == 2
    for payload in ["a4", "b3", "c1"]:
        s.publish(payload, payload[0])
    assert s.take() == ["b3", "c1"]
    bus.wait(11)
    again = s.consume()
    assert [(m.payload, m.attempt) for m in again] == [("a1", 2)]
    s.ack(again[0].receipt)
    assert [(m.payload, m.attempt) for m in s.consume()] == [("a2", 1), ("a3", 1), ("a4", 1)]


def test_batch_ack_after_a_nack_finishes_what_is_left(s: Session) -> None:
    one_stream(s)
    for payload in ["a1", "b1", "a2"]:
        s.publish(payload, payload[0])
    page = s.consume()
    s.nack(page[0].receipt, delay=0)
    assert s.ack(page[0].batch) == 1
    assert s.take() == ["a1", "a2"]


def test_nack_of_a_middle_message_lets_earlier_ones_be(s: Session) -> None:
    one_stream(s)
    for i in range(4):
        s.publish(f"m{i}", "k")
    page = s.consume()
    s.nack(page[2].receipt, delay=0)
    assert s.ack(page[0].receipt, page[1].receipt) == 2
    assert s.take() == ["m2", "m3"]


def test_nack_from_the_back_keeps_the_order(bus: Bus, s: Session) -> None:
    """What waits already is put behind an earlier message that waits longer."""
    one_stream(s)
    for i in range(3):
        s.publish(f"m{i}", "k")
    page = s.consume()
    s.nack(page[2].receipt, delay=0)
    s.nack(page[1].receipt, delay=0)
    s.nack(page[0].receipt, delay=10)
    assert s.consume() == []
    bus.wait(11)
    assert s.take() == ["m0", "m1", "m2"]


def test_total_order_waits_for_what_failed(bus: Bus, s: Session) -> None:
    one_stream(s, "stream", 4)
    page = s.consume(3)
    assert s.ack(page[0].receipt) == 1
    s.nack(page[1].receipt, delay=10)
    with refused("PB004"):
        s.ack(page[2].receipt)
    assert s.consume() == []
    bus.wait(11)
    assert [(m.payload, m.attempt) for m in s.consume(1)] == [("e2", 2)]
    assert s.consume() == []
    s.ack(s.value("select batch from postbus.in_flight()"))
    assert s.take() == ["e3", "e4"]


def test_no_order_waits_for_nobody(s: Session) -> None:
    one_stream(s, "none")
    for i in range(3):
        s.publish(f"m{i}", "k")
    page = s.consume()
    s.nack(page[0].receipt, delay=10)
    assert s.ack(page[1].receipt, page[2].receipt) == 2
    s.publish("m3", "k")
    assert s.take() == ["m3"]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_many_parked_messages_keep_their_order(bus: Bus, s: Session, ordering: str) -> None:
    """More than are released at a time, and the head fails again in between."""
    one_stream(s, ordering)
    s.fill(300, keys=1)
    s.nack(s.consume(10)[0].receipt, delay=10)
    assert s.consume() == []
    bus.wait(11)
    got: list[str | None] = []
    for turn in range(1000):
        page = s.consume(70)
        if not page:
            break
        s.ack(page[0].receipt)
        got.append(page[0].payload)
        if turn % 5 == 0 and len(page) > 1:
            s.nack(page[1].receipt, delay=0)
        elif len(page) > 1:
            got += payloads(page[1:])
            s.ack(page[0].batch)
    assert got == [f"e{i}" for i in range(1, 301)]


# Exactly once.


def test_effect_and_ack_in_one_transaction(bus: Bus, s: Session) -> None:
    one_stream(s, count=3)
    s.rows("create table effect (id bigint)")
    worker = bus.session().begin()
    for m in worker.consume():
        worker.rows("insert into effect values (%s)", m.id)
        worker.ack(m.receipt)
    assert s.consume() == []
    worker.rollback()
    assert s.rows("select * from effect") == []
    page = worker.begin().consume()
    assert [(m.payload, m.attempt) for m in page] == [("e1", 1), ("e2", 1), ("e3", 1)]
    for m in page:
        worker.rows("insert into effect values (%s)", m.id)
    worker.ack(page[0].batch)
    worker.commit()
    assert s.rows("select id from effect order by 1") == [(1,), (2,), (3,)]
    assert s.consume() == []


def test_effect_with_ack_of_a_lease_from_before(bus: Bus, s: Session) -> None:
    """The lease is committed first; the effect stands or falls with the ack."""
    one_stream(s, count=1)
    s.rows("create table effect (id bigint)")
    slow, quick = bus.session(), bus.session()
    old = slow.consume(lease="1 second")
    bus.wait(2)
    new = quick.consume()
    slow.begin().rows("insert into effect values (1)")
    with refused("PB004"):
        slow.ack(old[0].receipt)
    slow.rollback()
    quick.begin().rows("insert into effect values (2)")
    quick.ack(new[0].receipt)
    quick.commit()
    assert s.rows("select id from effect") == [(2,)]


def test_ack_in_an_open_transaction_keeps_its_message(bus: Bus, s: Session) -> None:
    """It is neither handed out again when its time is up nor waited for."""
    one_stream(s, "none", 2)
    page = s.consume(lease="5 seconds")
    worker = bus.session().begin()
    worker.ack(page[0].batch)
    bus.wait(10)
    assert s.consume() == []
    worker.rollback()
    assert [m.attempt for m in s.consume()] == [2, 2]
