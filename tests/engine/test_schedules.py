"""Schedules: cron expressions in time zones, and slots that fire once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from postbus import engine
from tests.engine.bus import START, Bus, Message, Session, refused

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)

# Zones with days on which they change their clocks, and around which slots are compared.
CHANGES = [
    ("Europe/Zurich", date(2026, 3, 29)),
    ("Europe/Zurich", date(2026, 10, 25)),
    ("America/New_York", date(2026, 3, 8)),
    ("America/New_York", date(2026, 11, 1)),
    ("Australia/Lord_Howe", date(2026, 4, 5)),  # by half an hour
    ("Australia/Lord_Howe", date(2026, 10, 4)),
    ("America/Sao_Paulo", date(2018, 2, 18)),  # midnight comes twice
    ("America/Sao_Paulo", date(2018, 11, 4)),  # there is no midnight
    ("America/St_Johns", date(2010, 11, 7)),  # at 00:01, back into the day before
    ("Pacific/Apia", date(2011, 12, 30)),  # there is no such day
    ("Asia/Kathmandu", date(2026, 6, 1)),  # never, and a quarter of an hour off
    ("UTC", date(2028, 2, 29)),
]

MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]


# The oracle: every minute is looked at.


class Cron:
    """A cron expression as sets, for expressions that are right."""

    def __init__(self, text: str) -> None:
        fields = text.split()
        self.minutes = self.values(fields[0], range(60))
        self.hours = self.values(fields[1], range(24))
        self.days = self.values(fields[2], range(1, 32))
        self.months = self.values(fields[3], range(1, 13), MONTHS)
        self.weekdays = {v % 7 for v in self.values(fields[4], range(7), WEEKDAYS)}
        self.follows_real_time = "*" in fields[1]
        self.either = "*" not in fields[2] and "*" not in fields[4]

    @staticmethod
    def values(field: str, every: range, names: list[str] | None = None) -> set[int]:
        found: set[int] = set()
        for item in field.split(","):
            base, _, step = item.partition("/")
            if base == "*":
                span = every
            else:
                ends = [
                    int(end) if end.isdigit() else every.start + (names or []).index(end)
                    for end in base.split("-")
                ]
                span = range(ends[0], ends[-1] + 1)
            found |= set(span[:: int(step or 1)])
        return found

    def has_day(self, day: date) -> bool:
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and (by_day or by_weekday if self.either else by_day and by_weekday)

    def has(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours and self.has_day(wall.date())


def wall_of(at: datetime, zone: ZoneInfo) -> datetime:
    return at.astimezone(zone).replace(tzinfo=None, fold=0)


def instant(wall: datetime, zone: ZoneInfo) -> datetime:
    """When a clock on the wall shows this for the first time; where it never does, when it has passed it."""
    early, late = sorted(wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if wall_of(early, zone) == wall:
        return early
    if wall_of(late, zone) == wall:
        return late
    while wall_of(early, zone) < wall:
        early += MINUTE
    return early


def slots(cron: Cron, zone: ZoneInfo, after: datetime, until: datetime) -> Iterator[datetime]:
    """Every slot after the one time and up to the other, in order."""
    if cron.follows_real_time:
        at = after.replace(second=0, microsecond=0)
        while (at := at + MINUTE) <= until:
            if cron.has(wall_of(at, zone)):
                yield at
        return
    last = after
    wall = (wall_of(after, zone) - 2 * DAY).replace(second=0, microsecond=0)
    end = wall_of(until, zone) + 2 * DAY
    while (wall := wall + MINUTE) <= end:
        if cron.has(wall) and last < (at := instant(wall, zone)) <= until:
            yield at
            last = at


# What the engine says.

NEXT_SLOTS = """
with recursive r (at) as (
  select postbus._cron_next(%(cron)s, %(zone)s, %(after)s)
  union all
  select postbus._cron_next(%(cron)s, %(zone)s, r.at) from r where r.at <= %(until)s)
select at from r limit %(count)s"""


def compare(s: Session, cron: str, zone: str, after: datetime, until: datetime, count: int = 40) -> None:
    named = {"cron": cron, "zone": zone, "after": after, "until": until, "count": count}
    # In UTC: Python takes two zones' names for an hour that comes twice as different times.
    answer = [at.astimezone(UTC) for (at,) in s.conn.execute(NEXT_SLOTS, named) if at is not None]
    got = [at for at in answer if at <= until]
    expected = list(itertools.islice(slots(Cron(cron), ZoneInfo(zone), after, until), count))
    assert got == expected, f"{cron!r} in {zone} after {after}"


def next_slot(s: Session, cron: str, zone: str, after: str) -> str:
    """The next slot as people of that zone write it."""
    at = s.value("select postbus._cron_next(%s, %s, %s::timestamptz)", cron, zone, after)
    return f"{at.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M%z}"


def midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


CRONS = [
    "* * * * *",
    "0 * * * *",
    "*/7 * * * *",
    "30 */2 * * *",
    "30 2 * * *",
    "0,15,30,45 2 * * *",
    "*/20 0-3 * * *",
    "0 3 * * *",
    "5 0 * * *",
    "59 23 * * *",
    "30 1-2 * * sat,sun",
    "0 0 1,30 * mon",
    "15 2,23 */2 * */2",
]


@pytest.mark.parametrize(("zone", "day"), CHANGES, ids=str)
def test_slots_around_a_change_of_the_clock(s: Session, zone: str, day: date) -> None:
    # The zone of the session must not matter.
    s.rows(f"set timezone = '{zone}'")
    for cron in CRONS:
        for hours in (-30, -3, 9):
            after = midnight(day) + timedelta(hours=hours, seconds=hours)
            compare(s, cron, zone, after, after + 2 * DAY, count=12)


def field(least: int, most: int, names: list[str] | None = None) -> st.SearchStrategy[str]:
    """The text of one field: lists of values, ranges, names and steps; "*" as often as all the rest."""
    number = st.integers(least, most)
    value = number.map(str) if names is None else number.map(str) | st.sampled_from(names)
    span = st.tuples(number, number).map(lambda ends: f"{min(ends)}-{max(ends)}")
    step = st.builds("{}/{}".format, st.just("*") | span, st.integers(1, most - least))
    return st.just("*") | st.lists(value | span | step, min_size=1, max_size=3).map(",".join)


EXPRESSIONS = st.builds(
    "{} {} {} {} {}".format,
    field(0, 59),
    field(0, 23) | st.sampled_from(["0", "1", "2", "0-3"]),  # where clocks are changed
    field(1, 31),
    st.just("*") | field(1, 12, MONTHS),
    field(0, 7, WEEKDAYS),
)


def test_slots_of_made_up_expressions(s: Session) -> None:
    @given(
        cron=EXPRESSIONS,
        change=st.sampled_from(CHANGES),
        seconds=st.integers(-2 * 86400, 86400),
    )
    @settings(
        max_examples=150,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(cron: str, change: tuple[str, date], seconds: int) -> None:
        after = midnight(change[1]) + timedelta(seconds=seconds)
        compare(s, cron, change[0], after, after + 3 * DAY)

    check()


NEXT = [
    ("30 2 * * *", "Europe/Zurich", "2026-03-28 12:00Z", "2026-03-29 03:00+0200"),
    ("30 2 * * *", "Europe/Zurich", "2026-03-29 01:00Z", "2026-03-30 02:30+0200"),
    ("30 2 * * *", "Europe/Zurich", "2026-10-24 12:00Z", "2026-10-25 02:30+0200"),
    ("30 2 * * *", "Europe/Zurich", "2026-10-25 00:30Z", "2026-10-26 02:30+0100"),
    ("45 2 * * *", "Europe/Zurich", "2026-10-25 01:35Z", "2026-10-26 02:45+0100"),
    ("30 * * * *", "Europe/Zurich", "2026-10-25 00:30Z", "2026-10-25 02:30+0100"),
    ("30 */2 * * *", "Europe/Zurich", "2026-10-25 00:30Z", "2026-10-25 02:30+0100"),
    ("30 * * * *", "Europe/Zurich", "2026-03-29 00:30Z", "2026-03-29 03:30+0200"),
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00Z", "2026-10-04 02:30+1100"),
    ("0 0 * * *", "America/Sao_Paulo", "2018-11-03 12:00Z", "2018-11-04 01:00-0200"),
    ("0 12 30 12 *", "Pacific/Apia", "2011-12-29 12:00Z", "2011-12-31 00:00+1400"),
    ("0 0 29 2 *", "UTC", "2096-03-01 00:00Z", "2104-02-29 00:00+0000"),
    ("0 0 29 feb */7", "UTC", "2088-03-01 00:00Z", "2128-02-29 00:00+0000"),
    ("0 0 31 */2 *", "UTC", "2026-02-01 00:00Z", "2026-03-31 00:00+0000"),
    ("0 9 * * 7", "UTC", "2026-01-01 00:00Z", "2026-01-04 09:00+0000"),
    ("0 9 * * Fri-Sun", "UTC", "2026-01-03 10:00Z", "2026-01-04 09:00+0000"),
    ("0 9 13 * 5", "UTC", "2026-01-10 00:00Z", "2026-01-13 09:00+0000"),
    ("\t0  9 * JAN-mar/2 *\n", "UTC", "2026-01-31 10:00Z", "2026-03-01 09:00+0000"),
    ("@hourly", "Asia/Kathmandu", "2026-01-01 00:00Z", "2026-01-01 06:00+0545"),
    ("@daily", "UTC", "2026-01-01 00:00Z", "2026-01-02 00:00+0000"),
    ("@weekly", "UTC", "2026-01-01 00:00Z", "2026-01-04 00:00+0000"),
    ("@monthly", "UTC", "2026-01-01 00:00Z", "2026-02-01 00:00+0000"),
    ("@YEARLY", "UTC", "2026-01-01 00:00Z", "2027-01-01 00:00+0000"),
    ("* * * * *", "UTC", "2026-01-01 00:00:59.999999Z", "2026-01-01 00:01+0000"),
]


def test_next_slot(s: Session) -> None:
    for cron, zone, after, expected in NEXT:
        assert next_slot(s, cron, zone, after) == expected, (cron, zone, after)


def test_rare_slots_are_found_by_days(s: Session) -> None:
    """Forty years are not walked minute by minute."""
    s.rows("set statement_timeout = '2s'")
    query = (
        "select count(postbus._cron_next('0 0 29 2 */7', 'Europe/Zurich', '2088-03-01'))"
        " from generate_series(1, 100)"
    )
    assert s.value(query) == 100


# Making, changing and removing schedules.


def schedule(s: Session, name: str = "n", cron: str = "0 * * * *", target: str = "s", **named: Any) -> None:
    arguments = "".join(f", {argument} => %s" for argument in named)
    s.rows(f"select postbus.schedule(%s, %s, %s{arguments})", name, cron, target, *named.values())


def listed(s: Session, name: str = "n") -> dict[str, Any]:
    return dict(s.value("select to_jsonb(l) from postbus.list_schedules() l where l.name = %s", name))


def next_at(s: Session, name: str = "n") -> Any:
    return s.value("select next_at from postbus.list_schedules() where name = %s", name)


def fire(s: Session) -> int:
    return int(s.value("select postbus._fire_schedules(postbus.now_())"))


def received(s: Session) -> list[Message]:
    """Everything the group has not had yet, in order."""
    got: list[Message] = []
    empty = 0
    while empty < 3:
        page = s.consume(1000)
        empty = 0 if page else empty + 1
        if page:
            s.ack(page[0].batch)
            got += page
    return got


def fired(s: Session) -> list[tuple[str, str]]:
    """The name and the slot of every new message."""
    return [(m.headers["schedule"], m.headers["slot"]) for m in received(s)]


@pytest.fixture
def stream(s: Session) -> Session:
    s.stream()
    s.group()
    return s


WRONG = [
    ("", "five fields"),
    ("* * * *", "five fields"),
    ("* * * * * *", "five fields"),
    ("@reboot", "five fields"),
    ("60 * * * *", "wrong minute: '60'"),
    ("-1 * * * *", "wrong minute"),
    ("1.5 * * * *", "wrong minute"),
    ("*/0 * * * *", "wrong minute"),
    ("*/60 * * * *", "wrong minute"),
    ("5/15 * * * *", "wrong minute"),
    ("5, * * * *", "wrong minute"),
    ("1-2-3 * * * *", "wrong minute"),
    ("10-5 * * * *", "wrong minute"),
    ("99999999999999999999 * * * *", "wrong minute"),
    ("mon * * * *", "wrong minute"),
    ("* 24 * * *", "wrong hour"),
    ("* ** * * *", "wrong hour"),
    ("* * 0 * *", "wrong day"),
    ("* * 32 * *", "wrong day"),
    ("* * L * *", "wrong day"),
    ("* * ? * *", "wrong day"),
    ("* * * 13 *", "wrong month"),
    ("* * * january *", "wrong month"),
    ("* * * mon *", "wrong month"),
    ("* * * * 8", "wrong weekday"),
    ("* * * * sat-mon", "wrong weekday"),
    ("* * * * mon#2", "wrong weekday"),
    ("0 0 30 2 *", "never fires"),
    ("0 0 31 4,6,9,nov *", "never fires"),
]


def test_wrong_arguments(stream: Session) -> None:
    s = stream
    for cron, saying in WRONG:
        with refused("PB003", saying):
            schedule(s, cron=cron)
    with refused("PB003", "five fields"):
        s.rows("select postbus.schedule('n', null, 's')")
    for zone in [
        "Europe/Zuric",
        "",
        None,
        "UTC+2",
        "CET",
        "cest",
        "+02:00",
        "../UTC",
        "Zurich1",
        "Etc/GMT+x",
    ]:
        with refused("PB003", "unknown time zone"):
            schedule(s, timezone=zone)
    for name in ["", "1", "a b", "n" * 56]:
        with refused("PB003", "bad schedule name"):
            schedule(s, name)
    for missed in ["never", "", None]:
        with refused("PB003", "missed must not be"):
            schedule(s, missed=missed)
    for headers in ["[]", "1", "null"]:
        with refused("PB003", "JSON object"):
            s.rows("select postbus.schedule('n', '@daily', 's', headers => %s)", headers)
    for argument in ["payload", "type"]:
        with refused("PB003", "needs a payload and a type"):
            s.rows(f"select postbus.schedule('n', '@daily', 's', {argument} => null::text)")
    for target in ["nobody", ""]:
        with refused("PB001", "neither a queue nor a stream"):
            schedule(s, target=target)
    for verb in ["unschedule", "pause_schedule", "resume_schedule"]:
        with refused("PB001", "schedule 'n' does not exist"):
            s.rows(f"select postbus.{verb}('n')")
    assert s.rows("select * from postbus.list_schedules()") == []


def test_zones_that_are_right(stream: Session) -> None:
    for zone in ["UTC", "utc", "GMT", "europe/zurich", "America/Port-au-Prince", "Etc/GMT-2"]:
        schedule(stream, timezone=zone)
        assert listed(stream)["timezone"] == zone


def test_a_schedule_is_listed_as_it_was_made(stream: Session) -> None:
    schedule(stream)
    assert listed(stream) == {
        "name": "n", "cron": "0 * * * *", "timezone": "UTC", "target": "s", "payload": "{}",
        "type": "default", "key": None, "headers": None, "missed": "once", "paused": False,
        "next_at": "2030-01-01T01:00:00+00:00", "last_at": None, "problem": None,
        "created_at": "2030-01-01T00:00:00+00:00",
    }  # fmt: skip


def test_the_same_name_changes_in_place(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s, cron="0 6 * * *")
    s.rows("select postbus.pause_schedule('n')")
    bus.wait(3600)
    s.rows(
        "select postbus.schedule('n', '0 9 * * *', 's', '{\"a\": 1}'::jsonb, 'Europe/Zurich', 'report', 'k',"
        " '{\"h\": 1}', 'all')"
    )
    row = listed(s)
    assert row["paused"] is True
    assert row["created_at"] == "2030-01-01T00:00:00+00:00"
    s.rows("select postbus.resume_schedule('n')")
    assert next_at(s) == START.replace(hour=8)
    bus.wait(8 * 3600)
    assert fire(s) == 1
    (m,) = received(s)
    assert (m.payload, m.type, m.key) == ('{"a": 1}', "report", "k")
    assert m.headers == {"h": 1, "schedule": "n", "slot": "2030-01-01T08:00:00Z"}


def test_declaring_it_again_loses_no_missed_slot(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s, missed="all")
    bus.wait(7200)
    schedule(s, missed="all", type="new")
    assert fire(s) == 2
    schedule(s, cron="30 * * * *")
    assert next_at(s) == START.replace(hour=2, minute=30)


def test_unschedule(bus: Bus, stream: Session) -> None:
    schedule(stream)
    stream.rows("select postbus.unschedule('n')")
    bus.wait(7200)
    assert fire(stream) == 0


def test_install_again_keeps_schedules(bus: Bus, stream: Session) -> None:
    schedule(stream)
    before = stream.rows("select * from postbus.list_schedules()")
    engine.install(bus.db.connect())
    assert stream.rows("select * from postbus.list_schedules()") == before


# Firing.


def test_a_slot_fires_when_it_is_due(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s)
    bus.wait(3599)
    assert fire(s) == 0
    bus.wait(1)
    assert fire(s) == 1
    assert fire(s) == 0
    (m,) = received(s)
    assert (m.payload, m.type, m.key) == ("{}", "default", None)
    assert m.headers == {"schedule": "n", "slot": "2030-01-01T01:00:00Z"}
    row = listed(s)
    assert row["last_at"] == "2030-01-01T01:00:00+00:00"
    assert row["next_at"] == "2030-01-01T02:00:00+00:00"


def test_headers_cannot_take_the_place_of_the_slot(bus: Bus, stream: Session) -> None:
    stream.rows(
        "select postbus.schedule('n', '@hourly', 's', headers => '{\"slot\": \"mine\", \"trace\": \"4bf9\"}')"
    )
    bus.wait(3600)
    assert fire(stream) == 1
    (m,) = received(stream)
    assert m.headers == {"slot": "2030-01-01T01:00:00Z", "schedule": "n", "trace": "4bf9"}


def test_missed_once(bus: Bus, stream: Session) -> None:
    schedule(stream, cron="*/10 * * * *")
    bus.wait(86400 + 30)
    assert fire(stream) == 1
    assert fired(stream) == [("n", "2030-01-01T00:10:00Z")]
    assert next_at(stream) == START + DAY + 10 * MINUTE


def test_missed_all(bus: Bus, stream: Session) -> None:
    schedule(stream, missed="all")
    bus.wait(5 * 3600)
    assert fire(stream) == 5
    assert fired(stream) == [("n", f"2030-01-01T0{hour}:00:00Z") for hour in range(1, 6)]
    assert fire(stream) == 0


def test_missed_all_is_bounded_and_starves_nobody(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s, "busy", "* * * * *", missed="all")
    schedule(s, "calm", "0 12 * * *", missed="all")
    bus.wait(86400)
    assert [fire(s) for _ in range(3)] == [1001, 440, 0]
    got = fired(s)
    busy = [slot for name, slot in got if name == "busy"]
    assert busy == [f"{START + n * MINUTE:%Y-%m-%dT%H:%M:%SZ}" for n in range(1, 1441)]
    assert [slot for name, slot in got if name == "calm"] == ["2030-01-01T12:00:00Z"]


def test_missed_skip(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s, missed="skip")
    bus.wait(3600 + 60)
    assert fire(s) == 1
    bus.wait(3600 + 1)
    assert fire(s) == 0
    assert next_at(s) == START.replace(hour=3)
    bus.wait(5 * 3600)
    assert fire(s) == 0
    bus.wait(3600 - 61)
    assert fire(s) == 1
    assert fired(s) == [("n", "2030-01-01T01:00:00Z"), ("n", "2030-01-01T08:00:00Z")]


def test_paused_slots_never_fire(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s, missed="all")
    for _ in range(2):
        s.rows("select postbus.pause_schedule('n')")
    assert listed(s)["paused"] is True
    assert next_at(s) is None
    bus.wait(3 * 3600 + 60)
    assert fire(s) == 0
    s.rows("select postbus.resume_schedule('n')")
    assert fire(s) == 0
    assert next_at(s) == START.replace(hour=4)
    bus.wait(2 * 3600)
    # Resuming what is not paused takes nothing away.
    s.rows("select postbus.resume_schedule('n')")
    assert fire(s) == 2


def test_rollback_fires_nothing(bus: Bus, stream: Session) -> None:
    s = stream
    schedule(s)
    bus.wait(3600)
    s.begin()
    assert fire(s) == 1
    s.rollback()
    assert received(s) == []
    assert listed(s)["last_at"] is None
    assert fire(s) == 1
    assert fired(s) == [("n", "2030-01-01T01:00:00Z")]


def test_nobody_waits_for_who_fires(bus: Bus, stream: Session) -> None:
    s, other = stream, bus.session()
    schedule(s, "a")
    bus.wait(3600)
    s.begin()
    assert fire(s) == 1
    schedule(other, "b", "0 1 * * *")
    other.rows("update postbus.schedule set next_at = postbus.now_() where name = 'b'")
    assert fire(other) == 1
    s.commit()
    assert fire(other) == 0
    assert sorted(name for name, _ in fired(s)) == ["a", "b"]


def test_every_slot_fires_once_whoever_fires(bus: Bus, stream: Session) -> None:
    names = [f"n{i}" for i in range(12)]
    for i, name in enumerate(names):
        schedule(stream, name, "*/10 * * * *", missed=["once", "all"][i % 2])
    sessions = [bus.session() for _ in range(6)]
    barrier = threading.Barrier(len(sessions))

    def one(s: Session) -> int:
        barrier.wait(20)
        return sum(fire(s) for _ in range(3))

    with ThreadPoolExecutor(len(sessions)) as pool:
        for _ in range(6):
            bus.wait(1200)
            # Two slots each: one message for "once", two for "all".
            assert sum(pool.map(one, sessions)) == 18
    got = fired(stream)
    assert len(got) == len(set(got)) == 6 * 18


def test_a_slot_that_was_taken_meanwhile_does_not_fire_again(bus: Bus, stream: Session) -> None:
    """One that is held up in the middle looks at the rest with an old snapshot, and yet does not fire it."""
    s, held_up, gate = stream, bus.session(), bus.session()
    for i in range(100):
        schedule(s, f"n{i}")
    bus.wait(3600)
    s.rows(
        """create function wait() returns trigger language plpgsql as $$
        begin
          if current_setting('test.wait', true) = 'on' then
            perform pg_advisory_xact_lock(1);
          end if;
          return new;
        end $$;
        create trigger wait before update of last_at on postbus.schedule
          for each row execute function wait()"""
    )
    held_up.rows("set test.wait = on")
    gate.rows("select pg_advisory_lock(1)")
    with bus.blocked(held_up, lambda: fire(held_up)) as answer:
        here = fire(s)
        gate.rows("select pg_advisory_unlock(1)")
    assert here > 0
    assert here + answer.result() == 100
    assert len(set(fired(s))) == 100


# What goes wrong.


def test_a_broken_target_does_not_stop_the_others(bus: Bus, stream: Session) -> None:
    s = stream
    s.stream("gone")
    for name, target in [("a", "gone"), ("b", "s")]:
        schedule(s, name, target=target, missed="all")
    s.rows("select postbus.drop_stream('gone')")
    bus.wait(7200)
    assert fire(s) == 2
    assert {name for name, _ in fired(s)} == {"b"}
    row = listed(s, "a")
    assert row["problem"] == "target 'gone' is neither a queue nor a stream"
    assert row["next_at"] == "2030-01-01T03:00:00+00:00"
    assert row["last_at"] is None
    assert listed(s, "b")["problem"] is None

    # The slots that failed are not made up for.
    s.stream("gone")
    s.group(of="gone")
    bus.wait(3600)
    assert fire(s) == 2
    assert listed(s, "a")["problem"] is None
    (m,) = s.consume(of="gone")
    assert m.headers["slot"] == "2030-01-01T03:00:00Z"


def test_a_broken_target_is_cured_by_a_new_one(bus: Bus, stream: Session) -> None:
    s = stream
    s.stream("gone")
    schedule(s, target="gone")
    s.rows("select postbus.drop_stream('gone')")
    bus.wait(3600)
    assert fire(s) == 0
    schedule(s, target="s")
    assert listed(s)["problem"] is None
    bus.wait(3600)
    assert fire(s) == 1


def test_a_zone_that_the_server_no_longer_knows(bus: Bus, stream: Session) -> None:
    s = stream
    for name in ["a", "b"]:
        schedule(s, name)
    s.rows("update postbus.schedule set timezone = 'Nowhere/Gone' where name = 'a'")
    bus.wait(3600)
    assert fire(s) == 1
    row = listed(s, "a")
    assert "Nowhere/Gone" in row["problem"]
    assert row["next_at"] == "2030-01-01T02:00:00+00:00"


@pytest.mark.parametrize("state", ["40P01", "55P03", "53100", "PB006"])
def test_what_passes_by_itself_loses_no_slot(bus: Bus, stream: Session, state: str) -> None:
    s = stream
    schedule(s, missed="all")
    s.rows(
        f"""create function fail() returns trigger language plpgsql as $$
        begin
          raise exception 'try later' using errcode = '{state}';
        end $$;
        create trigger fail before update of last_at on postbus.schedule
          for each row execute function fail()"""
    )
    bus.wait(3600)
    assert fire(s) == 0
    assert listed(s)["problem"] == "try later"
    assert received(s) == []
    s.rows("drop trigger fail on postbus.schedule")
    bus.wait(3600)
    assert fire(s) == 2
    assert listed(s)["problem"] is None
    assert [slot for _, slot in fired(s)] == ["2030-01-01T01:00:00Z", "2030-01-01T02:00:00Z"]


# Targets that are queues.


def test_a_queue_as_target(bus: Bus, s: Session) -> None:
    s.rows("select postbus.create_queue('q')")
    schedule(s, target="q", payload='{"a": 1}', type="report", key="k")
    bus.wait(3600)
    assert fire(s) == 1
    assert s.rows("select payload, type, key, headers from postbus.receive('q', 10)") == [
        ('{"a": 1}', "report", "k", {"schedule": "n", "slot": "2030-01-01T01:00:00Z"})
    ]
    s.rows("select postbus.drop_queue('q', force => true)")
    bus.wait(3600)
    assert fire(s) == 0
    assert listed(s)["problem"] == "target 'q' is neither a queue nor a stream"
