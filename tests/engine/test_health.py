"""Findings: each appears when there is reason for it, names its remedy, and goes away with it."""

from __future__ import annotations

import pytest

from tests.conftest import Database
from tests.queue.work import Desk, Office


@pytest.fixture
def bus(db: Database) -> Office:
    return Office(db)


@pytest.fixture
def s(bus: Office) -> Desk:
    return bus.session()


def health(s: Desk, patience: str = "15 minutes") -> dict[str, tuple[str, str, str]]:
    """Level, message and remedy by object; there is one finding for each in these tests."""
    rows = s.rows("select object, level, message, remedy from postbus.health(%s::interval)", patience)
    found = {row[0]: (row[1], row[2], row[3]) for row in rows}
    assert len(found) == len(rows), rows
    return found


def stuck(s: Desk, threshold: str = "1 hour") -> dict[str, str]:
    return dict(s.rows('select "group", reason from postbus.stuck_groups(%s::interval)', threshold))


def test_nothing_is_wrong_with_a_bus_that_works(bus: Office, s: Desk) -> None:
    assert health(s) == {}
    s.queue()
    s.stream(lanes=2)
    s.group()
    s.send_many(3)
    s.fill(3)
    assert health(s) == {}
    s.drain()
    s.take()
    s.maintain(3)
    bus.wait(100_000)
    assert health(s) == {}
    assert stuck(s) == {}


def test_paused(s: Desk) -> None:
    s.queue()
    s.stream()
    s.group()
    for name in ("q", "s"):
        s.rows("select postbus.pause(%s)", name)
    s.rows("select postbus.pause('s', 'g')")
    assert health(s) == {
        "queue q": ("warn", "is paused", "postbus resume q"),
        "stream s": ("warn", "is paused", "postbus resume s"),
        "group g of stream s": ("warn", "is paused", "postbus resume s --group g"),
    }
    for name in ("q", "s"):
        s.rows("select postbus.resume(%s)", name)
    s.rows("select postbus.resume('s', 'g')")
    assert health(s) == {}


def test_dead_letters_and_whether_they_are_new(bus: Office, s: Desk) -> None:
    s.queue()
    s.stream()
    s.group()
    s.send("x")
    s.fill(2)
    s.rows("select postbus.dead_letter(receipt) from postbus.receive('q')")
    s.rows("select postbus.dead_letter(array(select receipt from postbus.consume('s', 'g')))")
    assert health(s) == {
        "queue q": ("warn", "has 1 dead letters, 1 of them from the last hour", "postbus dlq list q"),
        "stream s": ("warn", "has 2 dead letters, 2 of them from the last hour", "postbus dlq list s"),
    }
    s.maintain(2)
    bus.wait(3601)
    assert health(s)["queue q"][1] == "has 1 dead letters"
    for name in ("q", "s"):
        s.rows("select postbus.purge_dead_letters(%s, interval '0')", name)
    assert health(s) == {}


def test_a_queue_that_nobody_receives_from(bus: Office, s: Desk) -> None:
    s.queue()
    s.send("later", delay="1 hour")
    bus.wait(3600 + 14 * 60)
    assert health(s) == {}, "waiting on purpose does not count"
    bus.wait(61)
    level, message, _ = health(s)["queue q"]
    assert (level, message) == ("warn", "has 1 messages that nobody receives, the first for 15 min 1 s")
    s.send("more")
    assert len(s.receive(1)) == 1
    assert health(s) == {}, "somebody works on it"


def test_a_key_over_its_rate_waits_with_good_reason(bus: Office, s: Desk) -> None:
    s.queue()
    s.policy(rate=0.001)
    s.send_all("a", "b", "c", keys=["k"] * 3)
    assert s.drain() == ["a"]
    bus.wait(16 * 60)
    assert health(s) == {}
    bus.wait(3600)
    assert "queue q" in health(s)


def test_a_full_queue(s: Desk) -> None:
    s.queue(max_size=3)
    s.send_many(2)
    assert health(s) == {}
    s.send("x", delay="1 hour")
    assert health(s)["queue q"][1] == "is full: it has the 3 messages that it may have, and refuses more"
    s.receive(1)
    assert "queue q" in health(s)
    s.drain()
    assert health(s) == {}


def test_a_group_that_reads_nothing(bus: Office, s: Desk) -> None:
    s.stream()
    s.group()
    s.fill(3)
    s.maintain()
    bus.wait(901)
    assert health(s)["group g of stream s"] == (
        "warn",
        "has taken nothing for 15 min 1 s, and about 3 events wait",
        "start its workers; or, if nobody needs it: postbus groups drop s g",
    )
    assert stuck(s) == {}
    assert stuck(s, "10 minutes") == {"g": "not read"}
    bus.wait(3000)
    assert stuck(s) == {"g": "not read"}
    s.take()
    assert stuck(s) == {}
    assert health(s) == {}


def test_leases_that_ran_out_and_messages_nobody_tries_again(bus: Office, s: Desk) -> None:
    s.stream()
    s.group("gone", ordering="none")
    s.group("idle", ordering="none")
    s.fill(2)
    s.consume(by="gone")
    s.nack(*[m.receipt for m in s.consume(by="idle")], delay=5)
    s.maintain()
    bus.wait(600)
    assert stuck(s) == {}
    bus.wait(3600)
    assert stuck(s) == {"gone": "lease ran out", "idle": "redelivery"}
    found = health(s)
    assert found["group gone of stream s"][1].startswith("has 2 messages on leases that ran out")
    assert found["group idle of stream s"][1].startswith("has 2 messages that wait for another try")
    s.take(by="gone")
    s.take(by="idle")
    assert stuck(s) == {}
    assert health(s) == {}


def test_a_lost_group_fails_also_when_it_is_paused(bus: Office, s: Desk) -> None:
    s.stream(retain=60, max_retain=120, rotate_every=30, segments=2)
    s.group()
    s.rows("select postbus.pause('s', 'g')")
    for _ in range(6):
        s.fill(3)
        s.maintain(2)
        bus.wait(100)
    s.maintain(3)
    rows = s.rows("select level, object, remedy from postbus.health() where level = 'fail'")
    assert rows == [("fail", "group g of stream s", "postbus seek s g earliest")]
    assert stuck(s) == {"g": "lost"}
    s.rows("select postbus.seek('s', 'g', 'earliest')")
    assert stuck(s) == {}


def test_schedules(bus: Office, s: Desk) -> None:
    s.queue()
    s.rows("select postbus.schedule('job', '* * * * *', 'q', 'x'::text)")
    assert health(s) == {}
    bus.wait(60 + 301)
    _level, message, remedy = health(s)["schedule job"]
    assert message.startswith("should have fired 5 min")
    assert remedy == "postbus maintain --every 1"
    s.maintain()
    assert health(s) == {}
    s.rows("select postbus.drop_queue('q', true)")
    bus.wait(61)
    s.maintain()
    assert health(s)["schedule job"][1].startswith("could not fire: ")
    s.rows("update postbus.schedule set problem = null")
    s.rows("select postbus.pause_schedule('job')")
    assert health(s)["schedule job"] == ("warn", "is paused", "postbus schedules resume job")


@pytest.mark.parametrize("sign", ["ticks", "busy", "scheduled", "expired"])
def test_missing_upkeep(bus: Office, s: Desk, sign: str) -> None:
    """Whatever it would have done, it is noticed; also in a stream where a tick is cut all the time."""
    s.queue()
    s.stream()
    s.group()
    s.maintain()
    if sign in {"ticks", "busy"}:
        s.fill(1)
        s.take()
    elif sign == "scheduled":
        s.rows("select postbus.publish('s', 'x'::text, deliver_at => postbus.now_() + interval '1 second')")
        bus.wait(1)
    else:
        s.send("x", ttl="1 second")
        bus.wait(1)
    bus.wait(299)
    assert health(s) == {}
    bus.wait(2)
    if sign == "busy":
        s.fill(1)
        s.take()
    level, message, remedy = health(s)["upkeep"]
    assert (level, remedy) == ("warn", "postbus maintain --every 1")
    assert message.startswith("has not been run for 5 min 1 s")
    bus.wait(3600)
    assert health(s, "1 day")["upkeep"][0] == "fail"
    s.maintain(2)
    s.take()
    s.maintain(2)
    assert health(s) == {}


def test_open_and_prepared_transactions(bus: Office, s: Desk) -> None:
    other = bus.db.connect(autocommit=False, application_name="sleeper")
    other.execute("select 1")
    about = f"transaction (pid {other.info.backend_pid})"
    assert about not in health(s)
    _level, message, remedy = health(s, "0 seconds")[about]
    assert message.startswith("of sleeper has been open for ")
    assert "(idle in transaction)" in message
    assert remedy == f"end it, or: select pg_terminate_backend({other.info.backend_pid})"
    other.rollback()
    other.execute("create table t ()")
    other.execute("prepare transaction 'it''s'")
    try:
        found = health(s, "0 seconds")["prepared transaction it's"]
    finally:
        other.rollback()
        other.autocommit = True
        other.execute("rollback prepared 'it''s'")
    assert found[2] == "commit prepared 'it''s', or rollback prepared 'it''s'"
    assert health(s, "0 seconds") == {}


def test_replication_slots_that_nobody_reads(s: Desk) -> None:
    slot = f"slot_{s.conn.info.backend_pid}"
    s.rows("select pg_create_physical_replication_slot(%s, true)", slot)
    try:
        found = health(s)[f"replication slot {slot}"]
    finally:
        s.rows("select pg_drop_replication_slot(%s)", slot)
    assert found[2] == f"start its reader, or: select pg_drop_replication_slot('{slot}')"


def test_groups_of_killed_tails(bus: Office, s: Desk) -> None:
    s.stream()
    s.group("tail:1", ordering="stream")
    assert health(s) == {
        "group tail:1": ("warn", "is left over from a tail that was killed", "postbus maintain")
    }
    alive = bus.session()
    alive.rows("select pg_advisory_lock(1886351987, hashtext('tail:1'))")
    assert health(s) == {}
    s.fill(1)
    s.maintain()
    bus.wait(100_000)
    assert health(s) == {}, "how far a tail reads is its own affair"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (59.94, "59.9 s"), (60, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (3660, "1 h 1 min"),
        (86399, "23 h 59 min"), (86400, "1 d"), (1_000_000, "11 d 13 h"), (-5, "0.0 s"),
    ],
)  # fmt: skip
def test_spans(s: Desk, seconds: float, text: str) -> None:
    assert s.value("select postbus._span(make_interval(secs => %s))", seconds) == text
