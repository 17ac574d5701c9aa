"""A poll that finds nothing costs nothing: no xid, no WAL, no lock that stays."""

from __future__ import annotations

import pytest

from tests.engine.bus import Bus, Session

ORDERINGS = ["stream", "key", "none"]
OWN_LOCKS = "select locktype, mode from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'"


@pytest.fixture(params=ORDERINGS)
def quiet(request: pytest.FixtureRequest, bus: Bus, s: Session) -> Session:
    """A stream that had some traffic and has none now."""
    s.stream(lanes=3)
    s.group(ordering=request.param)
    s.fill(40, keys=7)
    s.take()
    s.maintain(5)
    bus.wait(60)  # leases of ordering none that have ended: one look, and they are forgotten
    s.take()
    return s


def ticks(s: Session) -> int:
    return int(s.value("select count(*) from postbus.tick"))


def writes(s: Session) -> list[tuple[object, ...]]:
    """Every row version that the engine has, by place and writer."""
    tables = [
        r[0]
        for r in s.rows(
            "select oid::regclass::text from pg_class"
            " where relkind = 'r' and relnamespace = 'postbus'::regnamespace"
        )
    ]
    return [(t, *r) for t in tables for r in s.rows(f"select ctid, xmin from {t} order by ctid")]


def test_idle_poll_assigns_no_xid_and_takes_no_lock(bus: Bus, quiet: Session) -> None:
    before = writes(quiet)
    worker = bus.session().begin()
    for _ in range(30):
        assert worker.consume() == []
    assert worker.value("select pg_current_xact_id_if_assigned()") is None
    assert worker.rows(OWN_LOCKS) == []
    worker.commit()
    assert writes(quiet) == before


def test_idle_poll_writes_no_wal(quiet: Session) -> None:
    """Measured by the next xid and by what this session wrote; other databases may write meanwhile."""
    quiet.consume()
    before = quiet.value("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    start = quiet.value("select pg_current_wal_insert_lsn()")
    for _ in range(30):
        quiet.consume()
    wal = quiet.value("select pg_current_wal_insert_lsn() - %s::pg_lsn", start)
    after = quiet.value("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    if after == before:  # nobody else was at work
        assert wal < 10_000


def test_no_empty_ticks_beside_unrelated_writers(bus: Bus, quiet: Session) -> None:
    """Xids come and go, some stay open: none of them makes a tick."""
    quiet.rows("create table unrelated (n int)")
    quiet.stream("t")
    quiet.group(of="t")
    quiet.take()
    before = ticks(quiet)
    writer, other = bus.session(), bus.session().begin()
    other.rows("insert into unrelated values (0)")
    for i in range(20):
        writer.rows("insert into unrelated values (%s)", i)
        if i == 10:
            other.commit()
        assert quiet.consume() == []
    assert ticks(quiet) == before


def test_no_ticks_beside_an_open_producer(bus: Bus, quiet: Session) -> None:
    producer = bus.session().begin()
    producer.fill(100)
    before = ticks(quiet)
    for _ in range(20):
        assert quiet.consume() == []
    assert ticks(quiet) == before
    producer.rollback()
    for _ in range(20):
        assert quiet.consume() == []
    assert ticks(quiet) == before


def test_poll_of_a_busy_or_waiting_group_writes_nothing(bus: Bus, quiet: Session) -> None:
    """Nothing to hand out now is as cheap as nothing at all."""
    quiet.publish("busy", "a")
    quiet.publish("waits", "a")
    page = quiet.consume()
    quiet.nack(page[0].receipt, delay=100)
    quiet.consume()
    before = writes(quiet)
    worker = bus.session().begin()
    for _ in range(20):
        assert worker.consume() == []
    assert worker.value("select pg_current_xact_id_if_assigned()") is None
    worker.commit()
    assert writes(quiet) == before


def test_paused_poll_writes_nothing(bus: Bus, quiet: Session) -> None:
    quiet.fill(3)
    quiet.rows("select postbus.pause('s')")
    worker = bus.session().begin()
    assert worker.consume() == []
    assert worker.value("select pg_current_xact_id_if_assigned()") is None


def test_upkeep_of_a_quiet_stream_writes_nothing(quiet: Session) -> None:
    quiet.maintain(3)
    before = writes(quiet)
    quiet.maintain(3)
    assert writes(quiet) == before
