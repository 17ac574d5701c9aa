"""Messages that had their attempts: where they go, and how they come back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.bus import Bus, Session, payloads, refused

ORDERINGS = ["stream", "key", "none"]


@pytest.fixture
def one(s: Session) -> Session:
    s.stream()
    return s


def give_up(s: Session, by: str = "g") -> None:
    """Everything there is goes to the dead letters."""
    while page := s.consume(by=by):
        s.rows("select postbus.dead_letter(%s::text, 'given up on purpose')", page[0].batch)


def letters(s: Session, *args: Any) -> list[tuple[Any, ...]]:
    query = f"select group_name, payload, attempt, reason from postbus.dead_letters('s'{', %s' * len(args)})"
    return s.rows(query, *args)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_max_attempts_by_nack(one: Session, ordering: str) -> None:
    one.group(ordering=ordering, max_attempts=3)
    one.fill(2, keys=1)
    for attempt in range(1, 4):
        page = one.consume()
        assert [(m.payload, m.attempt) for m in page] == [("e1", attempt), ("e2", 1)][: len(page)]
        if ordering == "none" and attempt == 1:
            one.ack(page[1].receipt)
        one.nack(page[0].receipt, delay=0, reason=f"attempt {attempt}")
    assert letters(one) == [("g", "e1", 3, "attempt 3")]
    assert one.take() == ([] if ordering == "none" else ["e2"])
    assert one.figures()["dead_letters"] == 1


def test_a_dead_letter_is_the_whole_message(bus: Bus, one: Session) -> None:
    one.group()
    event = one.publish("text", "k", type="t", headers='{"h": 1}')
    bus.wait(5)
    give_up(one)
    (row,) = one.rows("select to_jsonb(d) from postbus.dead_letters('s') d")
    row[0].pop("id")
    assert row[0].pop("died_at").startswith("2030-01-01T00:00:05")
    assert row[0].pop("created_at").startswith("2030-01-01T00:00:00")
    assert row[0] == {
        "group_name": "g", "event_id": event, "type": "t", "key": "k", "payload": "text", "blob": None,
        "headers": {"h": 1}, "attempt": 1, "reason": "given up on purpose",
    }  # fmt: skip


def test_worker_that_dies_again_and_again(bus: Bus, one: Session) -> None:
    """The poison ends in the dead letters; what came with it does not."""
    one.group(ordering="none", max_attempts=3)
    one.fill(10)
    survivors = set()
    for _ in range(40):
        page = one.consume(lease="5 seconds")
        if "e4" in payloads(page):
            bus.wait(6)  # took the worker with it
        elif page:
            survivors.update(payloads(page))
            one.ack(page[0].batch)
    assert letters(one) == [("g", "e4", 3, "lease expired")]
    assert survivors == {f"e{i}" for i in range(1, 11)} - {"e4"}


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_last_try_is_made_alone_and_in_order(bus: Bus, one: Session, ordering: str) -> None:
    one.group(ordering=ordering, max_attempts=2)
    one.fill(4, keys=1)
    one.consume(lease="1 second")
    bus.wait(2)
    got = []
    for _ in range(4):
        page = one.consume(lease="1 second")
        assert [m.attempt for m in page] == [2]
        if page[0].payload == "e2":
            bus.wait(2)
        else:
            got += payloads(page)
            one.ack(page[0].receipt)
    assert got == ["e1", "e3", "e4"]
    assert letters(one) == [("g", "e2", 2, "lease expired")]


def test_listing_pages_and_filters(one: Session) -> None:
    for group in ["g", "h"]:
        one.group(group)
    one.fill(5)
    give_up(one, "g")
    give_up(one, "h")
    assert len(letters(one)) == 10
    assert [x[0] for x in letters(one, "h")] == ["h"] * 5
    ids = [x[0] for x in one.rows("select id from postbus.dead_letters('s', 'g', 3)")]
    more = one.rows("select id from postbus.dead_letters('s', 'g', 3, %s)", ids[-1])
    assert len(ids) == 3
    assert [x[0] for x in more] == [ids[-1] + 1, ids[-1] + 2]
    with refused("PB001", "no group 'x'"):
        letters(one, "x")
    with refused("PB001", "'x' does not exist"):
        one.rows("select * from postbus.dead_letters('x')")


def test_redrive_goes_to_the_owning_group_alone(one: Session) -> None:
    one.group("g", max_attempts=1)
    one.group("h", max_attempts=1)
    one.fill(3)
    give_up(one, "g")
    one.nack(one.consume(by="h")[1].receipt, delay=0)
    one.ack(one.value("select batch from postbus.in_flight() where \"group\" = 'h'"))
    ids = [x[0] for x in one.rows("select id from postbus.dead_letters('s', 'g') order by id")]
    assert one.value("select postbus.redrive('s', %s::bigint[])", ids[:1]) == 1
    assert [(m.payload, m.attempt) for m in one.consume()] == [("e1", 1)]
    assert one.take(by="h") == []
    assert one.value("select postbus.redrive('s', \"group\" => 'g')") == 2
    assert one.take(by="h") == []
    one.ack(one.value("select batch from postbus.in_flight()"))
    assert one.take() == ["e2", "e3"]
    assert one.value("select postbus.redrive('s')") == 1
    assert one.take(by="g") == []
    assert one.take(by="h") == ["e2"]
    assert letters(one) == []


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_redriven_messages_begin_again(one: Session, ordering: str) -> None:
    one.group(ordering=ordering, max_attempts=2)
    one.fill(1, keys=1)
    for _ in range(2):
        for attempt in [1, 2]:
            page = one.consume()
            assert [m.attempt for m in page] == [attempt]
            one.nack(page[0].batch, delay=0)
        assert one.consume() == []
        assert one.value("select postbus.redrive('s')") == 1
    assert one.take() == ["e1"]


def test_redrive_of_a_wrong_id_changes_nothing(one: Session) -> None:
    one.stream("t")
    one.group()
    one.group(of="t")
    one.fill(2)
    one.fill(1, to="t")
    give_up(one)
    page = one.consume(of="t")
    one.rows("select postbus.dead_letter(%s::text)", page[0].batch)
    ids = [x[0] for x in one.rows("select id from postbus.dead_letter order by id")]
    for wrong in [[ids[0], 999], [ids[0], ids[2]]]:
        with refused("PB001", "Nothing was changed"):
            one.rows("select postbus.redrive('s', %s::bigint[])", wrong)
    with refused("PB001", "no group"):
        one.rows("select postbus.redrive('s', null, 'x')")
    assert len(letters(one)) == 2
    assert one.consume() == []


def test_redrive_of_one_id_named_twice(one: Session) -> None:
    one.group()
    one.fill(1)
    give_up(one)
    letter = one.value("select id from postbus.dead_letters('s')")
    assert one.value("select postbus.redrive('s', %s::bigint[])", [letter, letter]) == 1
    assert one.take() == ["e1"]


def test_redrive_beside_a_waiting_message_of_its_key(bus: Bus, one: Session) -> None:
    """Later messages of the key stay behind both."""
    one.group(max_attempts=1)
    for i in range(4):
        one.publish(f"m{i}", "k")
    page = one.consume(2)
    one.nack(page[0].receipt)
    one.ack(page[1].receipt)
    one.rows("select postbus.alter_group('s', 'g', '{\"max_attempts\": 5}')")
    page = one.consume(2)
    one.nack(page[0].receipt, delay=10)
    one.rows("select postbus.redrive('s')")
    assert one.take() == ["m0"]
    bus.wait(11)
    assert one.take() == ["m2", "m3"]


def test_purge(bus: Bus, one: Session) -> None:
    one.group()
    one.group("h")
    one.fill(2)
    give_up(one)
    bus.wait(3600)
    give_up(one, "h")
    assert one.value("select postbus.purge_dead_letters('s')") == 0
    assert one.value("select postbus.purge_dead_letters('s', '1 minute', 'h')") == 0
    assert one.value("select postbus.purge_dead_letters('s', '1 minute')") == 2
    assert [x[0] for x in letters(one)] == ["h", "h"]
    assert one.value("select postbus.purge_dead_letters('s', '0 seconds')") == 2
    with refused("PB001"):
        one.rows("select postbus.purge_dead_letters('x')")


def test_drop_group_takes_its_dead_letters(one: Session) -> None:
    one.group()
    one.fill(1)
    give_up(one)
    one.rows("select postbus.drop_group('s', 'g')")
    one.group()
    assert letters(one) == []
    assert one.take() == ["e1"]
