"""Groups: what each ordering promises, where a group starts, and how it is moved, stopped and dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.bus import Bus, Session, payloads, refused

ORDERINGS = ["stream", "key", "none"]
KEYS = [f"k{i}" for i in range(12)]


def numbers(got: list[str | None]) -> list[int]:
    return [int(str(p)[1:]) for p in got]


# Orderings.


def test_ordering_stream_is_one_batch_at_a_time(bus: Bus, s: Session) -> None:
    """Over all lanes and for all workers: total order."""
    s.stream(lanes=4)
    s.group(ordering="stream")
    s.fill(40, keys=12)
    workers = [bus.session() for _ in range(3)]
    got: list[str | None] = []
    for turn in range(8):
        page = workers[turn % 3].consume(5)
        assert [w.consume(5) for w in workers] == [[], [], []]
        got += payloads(page)
        workers[(turn + 1) % 3].ack(page[0].batch)
    assert numbers(got) == list(range(1, 41))


def test_ordering_key_is_one_batch_per_lane(bus: Bus, s: Session) -> None:
    """As many workers as lanes; a key is never with two of them."""
    s.stream(lanes=4)
    s.group(ordering="key")
    s.fill(120, keys=12)
    pages = [bus.session().consume(1000) for _ in range(4)]
    assert sum(map(len, pages)) == 120
    assert all(pages)
    keys = [{m.key for m in page} for page in pages]
    assert sum(map(len, keys)) == 12
    for page in pages:
        ids = [m.id for m in page]
        assert ids == sorted(ids)
    assert bus.session().consume() == []


def test_busy_lanes_are_not_empty(bus: Bus, s: Session) -> None:
    """What waits in a busy lane is nobody else's, and comes when the lane is free."""
    s.stream(lanes=2)
    s.group(ordering="key")
    s.fill(40, keys=12)
    pages = [s.consume(3), bus.session().consume(3)]
    assert [len(p) for p in pages] == [3, 3]
    assert s.consume() == []
    s.ack(pages[0][0].batch)
    more = s.consume(1000)
    assert more
    assert {m.key for m in more}.isdisjoint({m.key for m in pages[1]})
    s.ack(more[0].batch)
    s.ack(pages[1][0].batch)
    assert len(s.take()) + len(more) + 6 == 40


def test_ordering_none_has_any_number_of_batches(bus: Bus, s: Session) -> None:
    s.stream()
    s.group(ordering="none")
    s.fill(50, keys=1)
    pages = [bus.session().consume(5) for _ in range(10)]
    assert sorted(m.id for page in pages for m in page) == list(range(1, 51))
    assert s.consume() == []
    for page in reversed(pages):
        s.ack(page[0].batch)
    assert s.consume() == []


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_one_consumer_reaches_every_lane(s: Session, ordering: str) -> None:
    """Also while one lane has more than it can ever finish."""
    s.stream(lanes=8)
    s.group(ordering=ordering)
    for key in KEYS:
        s.publish(f"first of {key}", key)
    s.fill(300, keys=1)
    waiting = {f"first of {key}" for key in KEYS}
    for _ in range(300):
        page = s.consume(1)
        if not page:
            break
        waiting.discard(str(page[0].payload))
        s.ack(page[0].batch)
        if not waiting:
            break
        s.publish("more", "k0")
    assert not waiting


@pytest.mark.parametrize("lanes", [3, 12])
def test_lanes_that_stand_at_a_lane_change_do_not_hide_the_others(s: Session, lanes: int) -> None:
    """Most lanes have come to the change, some have events left: every poll finds them."""
    s.stream(lanes=8)
    s.group(ordering="key")
    s.fill(60, keys=12)
    s.alter(lanes=lanes)
    got, empty = 0, 0
    while got < 60 and empty < 100:
        page = s.consume(3)
        empty += not page
        got += len(page)
        if page:
            s.ack(page[0].batch)
    assert (got, empty) == (60, 0)
    s.fill(12, keys=12)
    assert len(s.take()) == 12


def test_a_batch_that_is_open_elsewhere_hides_its_slot_only(bus: Bus, s: Session) -> None:
    """An uncommitted consume blocks nobody."""
    s.stream(lanes=2)
    s.group(ordering="key")
    s.fill(24, keys=12)
    first = bus.session().begin()
    taken = first.consume()
    others = s.take()
    assert len(taken) + len(others) == 24
    first.rollback()
    assert len(s.take()) == len(taken)


def test_groups_do_not_know_of_each_other(s: Session) -> None:
    s.stream()
    for ordering in ORDERINGS:
        s.group(ordering, ordering=ordering)
    s.fill(3)
    s.nack(s.consume(by="key")[0].batch)
    assert s.take(by="stream") == ["e1", "e2", "e3"]
    page = s.consume(by="none")
    assert len(page) == 3


def test_unknown_names(s: Session) -> None:
    s.stream()
    for call in [
        "consume('x', 'g')",
        "create_group('x', 'g')",
        "drop_group('x', 'g')",
        "seek('x', 'g', 'latest')",
    ]:
        with refused("PB001", "create_stream"):
            s.rows(f"select postbus.{call}")
    for call in ["consume('s', 'x')", "drop_group('s', 'x')", "seek('s', 'x', 'latest')", "pause('s', 'x')"]:
        with refused("PB001", "create_group"):
            s.rows(f"select postbus.{call}")
    s.group()
    with refused("PB002", "already has"):
        s.group()


BAD_OPTIONS: list[dict[str, Any]] = [
    {"ordring": "key"},
    {"max_attempts": 0},
    {"max_attempts": "many"},
    {"max_attempts": None},
    {"lease": 0},
    {"lease": None},
    {"lease": "soon"},
    {"lease": -1},
    {"backoff": None},
    {"backoff": "-1 s"},
    {"max_backoff": None},
]
BAD_AT_BIRTH: list[dict[str, Any]] = [
    {"ordering": "total"},
    {"start": "somewhere"},
    {"start": "tick:999999"},
    {"start": "id:x"},
]


def test_bad_group_options(s: Session) -> None:
    s.stream()
    for options in BAD_OPTIONS + BAD_AT_BIRTH:
        with refused("PB003"):
            s.group(**options)
    assert s.rows("select * from postbus.slot") == []


def test_bad_group_options_on_alter(s: Session) -> None:
    s.stream()
    s.group()
    before = s.rows("select * from postbus.group")
    for options in BAD_OPTIONS:
        with refused("PB003"):
            s.rows("select postbus.alter_group('s', 'g', %s::jsonb)", json.dumps(options))
        assert s.rows("select * from postbus.group") == before


def test_group_options_must_be_an_object(s: Session) -> None:
    s.stream()
    for bad in ["[]", "null", '"key"']:
        with refused("PB003", "Known options"):
            s.rows("select postbus.create_group('s', 'g', %s)", bad)
    for bad in ["", "1g", "a b", "g" * 56, "é"]:
        with refused("PB003", "name"):
            s.group(bad)
    s.group("g" * 55)


def test_alter_group(bus: Bus, s: Session) -> None:
    s.stream()
    s.group(max_attempts=5)
    s.rows("select postbus.alter_group('s', 'g', '{\"lease\": \"2 minutes\", \"max_attempts\": 1}')")
    s.fill(1)
    page = s.consume()
    bus.wait(100)
    assert s.consume() == []
    s.nack(page[0].batch)
    assert s.figures()["dead_letters"] == 1
    with refused("PB003", "unknown group option 'ordering'"):
        s.rows("select postbus.alter_group('s', 'g', '{\"ordering\": \"none\"}')")


# Starting and seeking.


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("how", ["create", "seek"])
def test_positions(bus: Bus, s: Session, how: str, ordering: str) -> None:
    s.stream(lanes=3)
    s.group("pacer")
    ticks, ids = [], []
    for turn in range(4):
        ids += [s.publish(f"{turn}", key) for key in KEYS]
        ticks.append(s.value("select postbus.tick('s')"))
        bus.wait(60)
    if how == "seek":
        s.group(ordering=ordering)
        s.take()
    half = str(bus.now.replace(minute=2, second=0))

    def turns(position: str) -> list[int]:
        if how == "seek":
            s.rows("select postbus.seek('s', 'g', %s)", position)
        else:
            s.group(ordering=ordering, start=position)
        got = s.take(7)
        if how == "create":
            s.rows("select postbus.drop_group('s', 'g')")
        return [sum(p == str(turn) for p in got) for turn in range(4)]

    assert turns("earliest") == [12, 12, 12, 12]
    assert turns("latest") == [0, 0, 0, 0]
    assert turns(f"tick:{ticks[0]}") == [0, 12, 12, 12]
    assert turns(f"tick:{ticks[3]}") == [0, 0, 0, 0]
    assert turns(f"id:{ids[0]}") == [12, 12, 12, 12]
    assert turns("id:0") == [12, 12, 12, 12]
    assert turns(f"id:{ids[17]}") == [0, 7, 12, 12]
    assert turns(f"id:{ids[-1]}") == [0, 0, 0, 1]
    assert turns(f"id:{ids[-1] + 1}") == [0, 0, 0, 0]
    assert turns(half) == [0, 0, 12, 12]
    assert turns(f"time:{half}") == [0, 0, 12, 12]
    assert turns("2000-01-01") == [12, 12, 12, 12]
    assert turns("infinity") == [0, 0, 0, 0]


def test_seek_to_a_timestamp_value(bus: Bus, s: Session) -> None:
    s.stream()
    s.group()
    s.publish("before")
    bus.wait(10)
    s.publish("after")
    s.take()
    s.rows("select postbus.seek('s', 'g', %s::timestamptz)", bus.now)
    assert s.take() == ["after"]


def test_seek_to_nowhere(s: Session) -> None:
    s.stream()
    s.group()
    s.fill(1)
    for bad in ["", "tick:", "tick:-1", "id:1.5", "id: 1", "tomorrowish", "tick:x", "id:9e9"]:
        with refused("PB003", "Use earliest, latest"):
            s.rows("select postbus.seek('s', 'g', %s)", bad)
    assert s.take() == ["e1"]


def test_ticks_of_other_streams_are_no_positions(s: Session) -> None:
    s.stream()
    s.stream("t")
    s.group()
    s.fill(1, to="t")
    tick = s.value("select postbus.tick('t')")
    with refused("PB003", "has no tick"):
        s.rows("select postbus.seek('s', 'g', %s)", f"tick:{tick}")


def test_start_latest_leaves_out_what_was_there(bus: Bus, s: Session) -> None:
    """And gets everything that commits afterwards, also with an older id."""
    s.stream()
    s.publish("before")
    late = bus.session().begin()
    late.publish("open")
    s.publish("before too")
    s.group(start="latest")
    s.group("default", start=None)
    s.publish("after")
    late.commit()
    assert sorted(map(str, s.take())) == ["after", "open"]
    assert sorted(map(str, s.take(by="default"))) == ["after", "open"]


def test_start_by_id_gets_what_commits_late(bus: Bus, s: Session) -> None:
    """A transaction that was open at the seek is not skipped, whatever its ids."""
    s.stream()
    late = bus.session().begin()
    late.publish("open")
    s.publish("one")
    two = s.publish("two")
    s.group(start=f"id:{two}")
    assert s.take() == ["two"]
    late.commit()
    assert s.take() == ["open"]


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("position", ["earliest", "latest"])
def test_seek_revokes_leases_and_drops_what_waits(bus: Bus, s: Session, ordering: str, position: str) -> None:
    s.stream()
    s.group(ordering=ordering)
    s.fill(6, keys=3)
    page = s.consume(3)
    s.nack(page[0].receipt, delay=10)
    s.rows("select postbus.seek('s', 'g', %s)", position)
    figures = s.figures()
    assert (figures["in_flight"], figures["waiting"]) == (0, 0)
    with refused("PB004"):
        s.ack(page[1].receipt)
    bus.wait(60)
    assert numbers(s.take()) == (list(range(1, 7)) if position == "earliest" else [])
    s.publish("e7")
    assert s.take() == ["e7"]


def test_seek_waits_for_an_open_batch(bus: Bus, s: Session) -> None:
    """An uncommitted consume and ack is either before the seek or does not count."""
    s.stream()
    s.group()
    s.fill(2)
    worker = bus.session().begin()
    page = worker.consume()
    with bus.blocked(s, lambda: s.rows("select postbus.seek('s', 'g', 'earliest')")) as done:
        worker.ack(page[0].batch)
        worker.commit()
    done.result()
    assert s.take() == ["e1", "e2"]


def test_seek_rolled_back(bus: Bus, s: Session) -> None:
    s.stream()
    s.group()
    s.fill(2)
    page = s.consume(1)
    other = bus.session().begin()
    other.rows("select postbus.seek('s', 'g', 'latest')")
    assert s.consume() == []
    other.rollback()
    s.ack(page[0].batch)
    assert s.take() == ["e2"]


# Stopping.


@pytest.mark.parametrize("what", ["stream", "group"])
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_pause_hands_out_nothing_new(bus: Bus, s: Session, what: str, ordering: str) -> None:
    s.stream()
    s.group(ordering=ordering)
    s.group("other", ordering=ordering)
    s.fill(2)
    page = s.consume(1)
    arguments = "'s'" if what == "stream" else "'s', 'g'"
    s.rows(f"select postbus.pause({arguments})")
    s.publish("e3")
    assert s.consume() == []
    bus.wait(60)
    assert s.consume() == [], "an expired lease"
    assert s.ack(page[0].batch) == 1
    assert (s.take(by="other") == []) == (what == "stream")
    s.rows(f"select postbus.resume({arguments})")
    assert s.take() == ["e2", "e3"]


def test_pause_and_resume_twice(s: Session) -> None:
    s.stream()
    s.group()
    s.fill(1)
    for verb in ["pause", "pause", "resume", "resume"]:
        s.rows(f"select postbus.{verb}('s')")
        s.rows(f"select postbus.{verb}('s', 'g')")
        assert s.figures()["paused"] == (verb == "pause")
        assert s.value("select paused from postbus.list_streams()") == (verb == "pause")
    assert s.take() == ["e1"]


# Looking and dropping.


def test_figures(bus: Bus, s: Session) -> None:
    s.stream()
    s.group(ordering="none")
    s.group("h", ordering="stream", max_attempts=3)
    assert s.figures()["pending"] == 0
    s.fill(10)
    s.rows("select postbus.tick('s')")
    bus.wait(90)
    figures = s.figures()
    assert (figures["pending"], figures["lag"]) == (10, "00:01:30")
    page = s.consume(4)
    s.nack(page[0].receipt, delay=10)
    s.rows("select postbus.dead_letter(%s::text)", page[1].receipt)
    s.ack(page[2].receipt)
    figures = s.figures()
    assert [figures[x] for x in ("pending", "in_flight", "waiting", "dead_letters")] == [6, 1, 1, 1]
    assert (figures["ordering"], figures["lanes"], figures["lost"], figures["expired"]) == (
        "none",
        1,
        False,
        0,
    )
    s.ack(page[0].batch)
    bus.wait(11)
    s.take()
    figures = s.figures()
    assert [figures[x] for x in ("pending", "in_flight", "waiting", "lag")] == [0, 0, 0, "00:00:00"]
    assert s.figures("h")["pending"] == 10
    assert s.figures("h")["max_attempts"] == 3


def test_in_flight_names_workers(bus: Bus, s: Session) -> None:
    s.stream()
    s.group(ordering="none")
    s.fill(4)
    first = s.consume(3, worker="w1", lease="1 minute")
    bus.wait(10)
    s.consume(1, worker="w2")
    s.ack(first[0].receipt)
    rows = s.rows(
        "select batch, messages, worker, expires_at - %s::timestamptz from postbus.in_flight()", bus.now
    )
    assert [(r[0] == first[0].batch, r[1], r[2], r[3].total_seconds()) for r in rows] == [
        (True, 2, "w1", 50),
        (False, 1, "w2", 30),
    ]
    assert s.rows("select * from postbus.in_flight('x')") == []


def test_drop_group_leaves_nothing(bus: Bus, s: Session) -> None:
    s.stream(lanes=3)
    s.group()
    s.fill(30, keys=12)
    page = s.consume(5)
    s.nack(page[0].receipt, delay=5)
    s.rows("select postbus.dead_letter(%s::text)", page[0].batch)
    s.consume(5)
    s.rows("select postbus.drop_group('s', 'g')")
    for table in ["group", "slot", "progress", "lease", "redelivery", "dead_letter"]:
        assert s.rows(f'select * from postbus."{table}"') == []
    with refused("PB004"):
        s.ack(page[0].batch)
    with refused("PB001"):
        s.consume()
    s.group()
    assert len(s.take()) == 30


def test_drop_group_waits_for_an_open_batch(bus: Bus, s: Session) -> None:
    s.stream()
    s.group()
    s.fill(1)
    worker = bus.session().begin()
    worker.consume()
    with bus.blocked(s, lambda: s.rows("select postbus.drop_group('s', 'g')")) as done:
        worker.commit()
    done.result()
    with refused("PB001"):
        worker.consume()
    assert s.rows("select * from postbus.lease") == []
