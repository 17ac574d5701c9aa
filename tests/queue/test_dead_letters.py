"""Dead letters of queues: listed, sent back, purged."""

from __future__ import annotations

from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told


def lay(s: Desk, count: int) -> list[int]:
    """So many messages m1, m2, ... in the dead letters; their ids there."""
    s.send_many(count)
    s.give_up(*[m.receipt for m in s.receive()])
    return [r[0] for r in s.rows("select id from postbus.dead_letters('q') order by id")]


def redrive(s: Desk, ids: list[int] | None = None) -> int:
    return int(s.value("select postbus.redrive('q', %s::bigint[])", ids))


def test_a_dead_letter_is_the_whole_message(bus: Office, kind: Desk) -> None:
    number = kind.send("text", "k", type="t", headers='{"h": 1}', priority=2)
    bus.wait(5)
    kind.give_up(kind.receive()[0].receipt, reason="on purpose")
    (row,) = kind.rows("select to_jsonb(d) from postbus.dead_letters('q') d")
    row[0].pop("id")
    assert row[0].pop("died_at").startswith("2030-01-01T00:00:05")
    assert row[0].pop("created_at").startswith("2030-01-01T00:00:00")
    assert row[0] == {
        "group_name": None, "event_id": number, "type": "t", "key": "k", "payload": "text", "blob": None,
        "headers": {"h": 1}, "attempt": 1, "reason": "on purpose",
    }  # fmt: skip
    redrive(kind)
    (m,) = kind.receive()
    assert (m.id, m.payload, m.type, m.key, m.headers, m.priority) == (number, "text", "t", "k", {"h": 1}, 2)


def test_listing_pages(kind: Desk) -> None:
    kind.queue("other")
    ids = lay(kind, 5)
    assert kind.rows("select id from postbus.dead_letters('q', max => 2)") == [(i,) for i in ids[:2]]
    assert kind.rows("select id from postbus.dead_letters('q', after => %s)", ids[2]) == [
        (i,) for i in ids[3:]
    ]
    assert kind.rows("select * from postbus.dead_letters('other')") == []


def test_a_queue_has_no_groups(one: Desk) -> None:
    (number,) = lay(one, 1)
    for call in ["dead_letters('q', 'g')", "redrive('q', null, 'g')", "purge_dead_letters('q', '0', 'g')"]:
        with refused("PB003", "'q' is a queue: it has no groups"):
            one.rows(f"select postbus.{call}")
    assert one.rows("select id from postbus.dead_letters('q')") == [(number,)]


def test_redrive_some_and_all(kind: Desk) -> None:
    ids = lay(kind, 4)
    assert redrive(kind, [ids[2], ids[1], ids[1]]) == 2
    assert kind.drain() == ["m2", "m3"]
    assert redrive(kind) == 2
    assert kind.drain() == ["m1", "m4"]
    assert redrive(kind) == 0


def test_redriven_messages_begin_again(kind: Desk) -> None:
    kind.alter_queue(max_attempts=2)
    kind.send("a")
    for _ in range(2):
        for attempt in [1, 2]:
            (m,) = kind.receive()
            assert m.attempt == attempt
            kind.give_back(m.receipt, reason=f"attempt {attempt}")
        assert kind.receive() == []
        assert kind.letters() == [("a", 2, "attempt 2")]
        assert redrive(kind) == 1
    assert kind.peek()[0]["reason"] == "redriven"


def test_redrive_of_a_wrong_id_changes_nothing(kind: Desk) -> None:
    kind.queue("other")
    kind.send("x", to="other")
    kind.give_up(kind.receive(of="other")[0].receipt)
    foreign = kind.value("select id from postbus.dead_letters('other')")
    ids = lay(kind, 2)
    for wrong in [[ids[0], foreign], [ids[0], 10**9]]:
        with refused("PB001", "'q' has only 1 of the 2 dead letters named"):
            redrive(kind, wrong)
    assert len(kind.letters()) == 2
    assert kind.receive() == []


def test_redrive_rolled_back(kind: Desk) -> None:
    lay(kind, 2)
    kind.begin()
    assert redrive(kind) == 2
    kind.rollback()
    assert kind.receive() == []
    assert len(kind.letters()) == 2


def test_two_redrives_at_once_bring_it_back_once(bus: Office, kind: Desk) -> None:
    lay(kind, 3)
    other = bus.session().begin()
    assert redrive(other) == 3
    assert redrive(kind) == 0  # neither waits nor takes them too
    other.commit()
    assert kind.drain() == ["m1", "m2", "m3"]


def test_purge(bus: Office, kind: Desk) -> None:
    ids = lay(kind, 2)
    bus.wait(3600)
    lay(kind, 1)
    assert kind.value("select postbus.purge_dead_letters('q')") == 0
    assert kind.value("select postbus.purge_dead_letters('q', '1 minute')") == 2
    assert len(kind.letters()) == 1
    with refused("PB001"):
        redrive(kind, ids)
    assert kind.value("select postbus.purge_dead_letters('q', '0 seconds')") == 1
    assert kind.look()["dead_letters"] == 0


def test_redriven_ones_do_not_disturb_what_waits(kind: Desk) -> None:
    lay(kind, 1)
    kind.send("waits")
    kind.bus.wait(1)
    redrive(kind)
    assert told(kind.receive()) == ["waits", "m1"]
