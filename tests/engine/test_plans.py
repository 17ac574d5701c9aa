"""What a page costs: rows touched grow with the page, not with the backlog, and that without ANALYZE.

The backlog is a million events in one lane and 300,000 in eight, in one database for all of these tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import _fresh
from tests.engine.bus import Bus, Message, Session

BACKLOG = {"one": 1_000_000, "eight": 300_000}
PAGE = 100
# Rows of the log that a page of 100 may touch: itself, and a look at the end of each lane, leaf and window.
ROWS = 4 * PAGE
BUFFERS = 1500


@pytest.fixture(scope="module")
def backlog(server_dsn: str, template: str) -> Iterator[Bus]:
    """Streams with a backlog: one (1 lane), eight (8 lanes). Statistics are never gathered."""
    for db in _fresh(server_dsn, template):
        bus = Bus(db)
        s = bus.session()
        s.rows(f"alter database {db.name} set synchronous_commit = off")
        for name, lanes in [("one", 1), ("eight", 8)]:
            s.stream(name, lanes=lanes)
            for (leaf,) in s.rows("select leaf from postbus.segment where stream_id is not null"):
                s.rows(f"alter table postbus.log_{leaf} set (autovacuum_enabled = off)")
            for _ in range(BACKLOG[name] // 10_000):
                s.fill(10_000, to=name, keys=1000)
        yield bus


@pytest.fixture
def s(backlog: Bus) -> Session:
    return backlog.session()


def log_rows(s: Session) -> int:
    """Rows of the log that this session has touched and not reported yet."""
    return int(
        s.value(
            "select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) from pg_stat_xact_user_tables"
            " where schemaname = 'postbus' and relname like 'log\\_%'"
        )
    )


def cost(s: Session, of: str, by: str = "g", max: int = PAGE) -> tuple[int, int, list[Message]]:
    """A consume, acknowledged: rows of the log touched, blocks touched, messages."""
    s.begin()
    before = log_rows(s)
    ((plan,),) = s.rows(
        "explain (analyze, buffers, timing off, format json) select * from postbus.consume(%s, %s, %s)",
        *(of, by, max),
    )
    top = plan[0]["Plan"]
    rows = log_rows(s) - before
    s.rollback()
    page = s.consume(max, by, of)
    assert s.ack(page[0].batch) == len(page) if page else True
    return rows, int(top["Shared Hit Blocks"] + top["Shared Read Blocks"]), page


def check(s: Session, of: str, by: str = "g", max: int = PAGE, rows: int = ROWS) -> list[Message]:
    touched, blocks, page = cost(s, of, by, max)
    assert len(page) == max
    assert touched <= rows, f"{touched} rows for {len(page)} messages"
    assert blocks <= BUFFERS, f"{blocks} blocks for {len(page)} messages"
    return page


def test_nobody_analysed(s: Session) -> None:
    """Or the other tests prove nothing."""
    assert (
        s.rows(
            "select relname from pg_class where relname like 'log\\_%' and relkind = 'r' and reltuples > 0"
        )
        == []
    )


@pytest.mark.parametrize(("stream", "ordering"), [
    ("one", "key"), ("one", "stream"), ("one", "none"),
    ("eight", "key"), ("eight", "stream"), ("eight", "none"),
])  # fmt: skip
def test_first_pages_and_a_page_in_the_middle(s: Session, stream: str, ordering: str) -> None:
    group = f"pages_{ordering}"
    s.group(group, of=stream, ordering=ordering)
    # Ordering stream looks at a page of every lane.
    rows = ROWS + (8 * PAGE if (stream, ordering) == ("eight", "stream") else 0)
    for _ in range(7):  # plans are cached and go generic from the sixth on
        check(s, stream, group, rows=rows)
    middle = BACKLOG[stream] // 2
    s.rows("select postbus.seek(%s, %s, %s)", stream, group, f"id:{middle}")
    first = check(s, stream, group, rows=rows)
    assert min(m.id for m in first) >= middle
    check(s, stream, group, rows=rows)


def test_rows_grow_with_the_page(s: Session) -> None:
    s.group("sizes", of="one")
    small, _, _ = cost(s, "one", "sizes", 10)
    large, _, _ = cost(s, "one", "sizes", 1000)
    assert 10 <= small <= 40
    assert 1000 <= large <= 4000


def test_first_page_at_the_end_of_a_stream_nobody_read(s: Session) -> None:
    s.stream("unread")
    for _ in range(3):
        s.fill(10_000, to="unread")
    s.group("end", of="unread", start="latest")
    s.publish("new", to="unread")
    touched, _, page = cost(s, "unread", "end")
    assert [m.payload for m in page] == ["new"]
    assert touched <= 100


@pytest.mark.parametrize("stream", ["one", "eight"])
def test_late_transaction_of_many_events(backlog: Bus, s: Session, stream: str) -> None:
    """A large transaction that commits late is read page by page, not as a whole for each."""
    for _ in range(2):  # ticks up to here
        s.publish("before", to=stream)
        s.rows("select postbus.tick(%s)", stream)
    late = backlog.session().begin()
    for _ in range(5):
        late.fill(10_000, to=stream, keys=1000)
    s.publish("after", "k1", to=stream)
    s.group("late", of=stream, start="latest")
    late.commit()
    s.publish("last", "k1", to=stream)
    lanes = 8 if stream == "eight" else 1
    for _ in range(8):
        # The probe of a late transaction goes by (txid, id): events of other lanes are passed over.
        check(s, stream, "late", rows=ROWS * lanes)
    s.rows("select postbus.drop_group(%s, 'late')", stream)


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_poll_beside_a_large_open_transaction(backlog: Bus, s: Session, ordering: str) -> None:
    """Uncommitted events are jumped over, not walked at every poll."""
    group = f"idle_{ordering}"
    s.group(group, of="eight", ordering=ordering, start="latest")
    producer = backlog.session().begin()
    for _ in range(10):
        producer.fill(10_000, to="eight", keys=1000)
    for _ in range(3):
        touched, blocks, page = cost(s, "eight", group)
        assert page == []
        assert touched <= 50
        assert blocks <= BUFFERS
    s.publish("p", "k1", to="eight")
    touched, blocks, page = cost(s, "eight", group)
    assert [m.payload for m in page] == ["p"]
    assert touched <= 50
    producer.rollback()
