"""The archive: what was finished, found by id, key and time, and gone by the day when its time is over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Database
from tests.queue.work import Desk, Office


@pytest.fixture(params=["plain", "keyed", "unlogged"])
def kept(request: pytest.FixtureRequest, s: Desk) -> Desk:
    s.queue(on_ack="archive", unlogged_unsafe=request.param == "unlogged")
    if request.param == "keyed":
        s.policy(concurrency=100)
    return s


def archived(s: Desk, **by: Any) -> list[str]:
    named = "".join(f", {name} => %s" for name in by)
    return [r[0] for r in s.rows(f"select payload from postbus.archived('q'{named})", *by.values())]


def test_the_whole_message(bus: Office, kept: Desk) -> None:
    number = kept.send("text", "k", type="t", headers='{"h": 1}', priority=3)
    bus.wait(5)
    kept.give_back(kept.receive()[0].receipt)
    (m,) = kept.receive(worker="w")
    kept.extend(m.receipt, state={"half": True})
    bus.wait(5)
    kept.ack(m.receipt)
    row = kept.value("select to_jsonb(a) from postbus.archived('q') a")
    times = {k: row.pop(k)[:19] for k in ["created_at", "finished_at", "expires_at"]}
    assert times == {
        "created_at": "2030-01-01T00:00:00", "finished_at": "2030-01-01T00:00:10",
        "expires_at": "2030-01-08T00:00:10",
    }  # fmt: skip
    assert row == {
        "id": number, "type": "t", "key": "k", "payload": "text", "blob": None, "headers": {"h": 1},
        "priority": 3,
        "attempt": 2, "worker": "w", "saved": {"half": True},
    }  # fmt: skip


def test_by_id_key_and_time(bus: Office, kept: Desk) -> None:
    start = bus.now
    ids = {}
    for i in range(6):
        ids[f"m{i}"] = kept.send(f"m{i}", "ab"[i % 2])
        kept.drain()
        bus.wait(60)
    assert archived(kept) == ["m5", "m4", "m3", "m2", "m1", "m0"]
    assert archived(kept, max=2) == ["m5", "m4"]
    assert archived(kept, id=ids["m3"]) == ["m3"]
    assert archived(kept, key="a") == ["m4", "m2", "m0"]
    at = [start + timedelta(minutes=i) for i in range(6)]
    assert archived(kept, since=at[4]) == ["m5", "m4"]
    assert archived(kept, until=at[2]) == ["m1", "m0"]
    assert archived(kept, since=at[1], until=at[4], key="b") == ["m3", "m1"]
    assert archived(kept, id=ids["m3"], key="a") == []


def test_what_is_archived_and_what_is_not(kept: Desk) -> None:
    kept.queue("other")
    kept.send("x", to="other")
    kept.drain(of="other")
    for fate in ["acked", "popped", "dead", "cancelled", "purged"]:
        number = kept.send(fate)
        if fate == "popped":
            kept.pop()
        elif fate == "cancelled":
            kept.rows("select postbus.cancel('q', %s)", number)
        elif fate == "purged":
            kept.rows("select postbus.purge_queue('q')")
        else:
            verb = kept.ack if fate == "acked" else kept.give_up
            verb(kept.receive()[0].receipt)
    assert sorted(archived(kept)) == ["acked", "popped"]
    assert kept.rows("select * from postbus.archived('other')") == []


def test_in_the_callers_transaction(kept: Desk) -> None:
    kept.send("a")
    (m,) = kept.receive()
    kept.begin().ack(m.receipt)
    assert archived(kept) == ["a"]
    kept.rollback()
    assert archived(kept) == []
    kept.ack(m.receipt)
    assert archived(kept) == ["a"]


def test_binary_and_many(kept: Desk) -> None:
    kept.rows("select postbus.send_batch('q', array['\\x00'::bytea, '\\xff'])")
    page = kept.receive()
    kept.ack(*[m.receipt for m in page])
    assert kept.rows("select blob from postbus.archived('q') order by id") == [(b"\x00",), (b"\xff",)]


def test_on_ack_can_be_changed(one: Desk) -> None:
    one.send("before")
    one.drain()
    one.alter_queue(on_ack="archive")
    one.send("during")
    one.drain()
    one.alter_queue(on_ack="delete")
    one.send("after")
    one.drain()
    assert archived(one) == ["during"]


def test_retention_is_that_of_when_it_was_finished(bus: Office, kept: Desk) -> None:
    kept.alter_queue(archive_retain="1 hour")
    kept.send("hour")
    kept.drain()
    kept.alter_queue(archive_retain="1 day")
    kept.send("day")
    kept.drain()
    bus.wait(3599)
    assert archived(kept) == ["day", "hour"]
    bus.wait(1)
    assert archived(kept) == ["day"]  # whether or not upkeep has been there
    bus.wait(86400)
    assert archived(kept) == []


# Days, in a database of their own.


@pytest.fixture
def days(db: Database) -> Desk:
    s = Office(db).session()
    s.queue(on_ack="archive", archive_retain="1 day")
    return s


def partitions(s: Desk) -> list[str]:
    query = "select relname from pg_class where relname ~ '^archive_2' and relkind = 'r' order by 1"
    return [r[0] for r in s.rows(query)]


def places(s: Desk) -> list[tuple[str, str]]:
    return s.rows("select payload, tableoid::regclass::text from postbus.archive order by id")


def finish(s: Desk, payload: str) -> None:
    s.send(payload)
    assert s.drain() == [payload]


def test_days_are_made_ahead_and_dropped(days: Desk) -> None:
    assert partitions(days) == ["archive_20300102", "archive_20300103", "archive_20300104"]
    finish(days, "first")
    days.bus.wait(86400)
    assert days.maintain()["days made"] == 1
    finish(days, "second")
    assert places(days) == [("first", "postbus.archive_20300102"), ("second", "postbus.archive_20300103")]
    days.bus.wait(86400)
    days.maintain(3)
    assert partitions(days)[0] == "archive_20300103"
    assert places(days) == [("second", "postbus.archive_20300103")]
    days.bus.wait(10 * 86400)
    done = days.maintain(10)
    assert "archive_20300103 dropped" in done
    assert places(days) == []
    assert partitions(days) == ["archive_20300114", "archive_20300115", "archive_20300116"]


def test_each_retention_has_its_days(days: Desk) -> None:
    days.queue("long", on_ack="archive", archive_retain="30 days")
    days.send("x", to="long")
    days.drain(of="long")
    finish(days, "y")
    assert dict(places(days)) == {"x": "postbus.archive_20300131", "y": "postbus.archive_20300102"}
    days.bus.wait(2 * 86400)
    days.maintain(5)
    assert [p for p, _ in places(days)] == ["x"]


def test_without_upkeep_rows_go_into_the_rest(days: Desk) -> None:
    """They are found there, and go when their time is over; days can be made again."""
    days.bus.wait(5 * 86400)
    finish(days, "x")
    assert places(days) == [("x", "postbus.archive_rest")]
    assert archived(days) == ["x"]
    days.maintain(3)
    finish(days, "y")
    assert archived(days) == ["y", "x"]
    days.bus.wait(2 * 86400)
    days.maintain(10)
    assert archived(days) == []
    finish(days, "z")
    assert places(days) == [("z", "postbus.archive_20300109")]


def test_open_transactions_only_postpone(days: Desk) -> None:
    """Upkeep neither waits for them nor fails."""
    finish(days, "old")
    days.bus.wait(3 * 86400)
    days.maintain()
    other = days.bus.session().begin()
    assert isinstance(other, Desk)
    finish(other, "open")
    reader = days.bus.session().begin()
    reader.rows("select * from postbus.archived('q')")
    days.rows("set statement_timeout = '5s'")
    days.maintain(3)
    other.commit()
    reader.commit()
    days.maintain(5)
    assert [p for p, _ in places(days)] == ["open"]
    assert not [p for p in partitions(days) if p < "archive_20300104"]
