"""Staging: many tasks, one commit, once."""

from __future__ import annotations

import pytest

from tests.engine.bus import Bus, Session, payloads, refused


def stage(s: Session, attempt: str, *texts: str, chunk: int = 0) -> int:
    return int(s.value("select postbus.stage(%s, %s, %s::text[])", attempt, chunk, list(texts)))


def commit(s: Session, batch: int, *attempts: str, events: int, to: str = "stream => 's'") -> bool:
    query = f"select postbus.commit_staged('q', %s, %s::text[], %s, {to})"
    return bool(s.value(query, batch, list(attempts), events))


@pytest.fixture
def one(s: Session) -> Session:
    s.stream()
    s.group()
    return s


def test_a_batch_is_published_once(one: Session) -> None:
    s = one
    assert stage(s, "b", "3") == 1
    assert stage(s, "a", "1", "2") == 2
    assert stage(s, "a", "2b", chunk=1) == 1
    assert stage(s, "a", "2b", chunk=1) == 1, "once more: it counts once"
    stage(s, "failed attempt", "x")
    assert s.take() == []
    assert commit(s, 0, "a", "b", events=4)
    assert s.take() == ["1", "2", "2b", "3"]
    stage(s, "again", "1", "2", "2b", "3")
    assert not commit(s, 0, "again", events=4)
    assert s.take() == []
    stage(s, "next", "4")
    assert commit(s, 1, "next", events=1)
    assert s.take() == ["4"]
    assert s.value("select array_agg(attempt) from postbus.staged") == ["failed attempt"]
    assert s.rows("select batch, events from postbus.committed_batch") == [(1, 5)]
    assert s.value("select postbus.discard_staged(array['failed attempt', 'nobody'])") == 1


def test_whole_envelopes(one: Session) -> None:
    one.rows(
        "select postbus.stage('a', 0, blobs => array['\\x00'::bytea], types => array['t'],"
        " keys => array['k'], headers => array['{\"h\": 1}'::jsonb])"
    )
    assert commit(one, 5, "a", events=1)
    (m,) = one.consume()
    assert (m.blob, m.type, m.key, m.headers) == (b"\0", "t", "k", {"h": 1})


def test_missing_events_publish_nothing(one: Session) -> None:
    stage(one, "a", "1", "2")
    with refused("PB001", "run the batch again"):
        commit(one, 0, "a", "b", events=3)
    assert one.take() == []
    assert commit(one, 0, "a", events=2)


def test_lanes_and_order(s: Session) -> None:
    """Keys have the lanes that publish gives them, and events the order of attempts, chunks and arrays."""
    s.stream(lanes=4)
    staged = []
    for attempt in ("b", "a"):
        for chunk in (1, 0, 2):
            texts = [f"{attempt}{chunk}.{i:02}" for i in range(50)]
            keys = [None if i % 10 == 9 else f"k{i}" for i in range(50)]
            s.rows(
                "select postbus.stage(%s, %s, %s::text[], keys => %s::text[])", attempt, chunk, texts, keys
            )
            staged += texts
    assert commit(s, 0, "b", "a", events=300)
    s.rows("select postbus.publish_batch('s', array(select 'p' from generate_series(0, 49)),"
           " keys => array(select 'k' || i from generate_series(0, 49) i))")  # fmt: skip
    wanted = sorted(staged, key=lambda t: (t[0] != "b", t))
    log = "from postbus.log where payload <> 'p'"
    assert s.value(f"select array_agg(payload order by id) {log}") == wanted
    assert s.value(f"select count(distinct txid) {log}") == 1
    lanes = "select key, count(distinct lane) from postbus.log where key is not null group by key"
    assert {n for _, n in s.rows(lanes)} == {1}
    assert s.value("select count(distinct lane) from postbus.log where key is null") > 1


def test_a_stream_with_bound_queues(one: Session) -> None:
    one.rows("select postbus.create_queue('jobs')")
    one.rows("select postbus.bind('jobs', stream => 's')")
    stage(one, "a", "1", "2")
    stage(one, "a", "3", chunk=1)
    assert commit(one, 0, "a", events=3)
    assert one.take() == ["1", "2", "3"]
    assert one.value("select array_agg(payload order by id) from postbus.receive('jobs', 10)") == [
        "1",
        "2",
        "3",
    ]


def test_listeners_are_woken(bus: Bus, one: Session) -> None:
    listener = bus.session()
    listener.rows('listen "postbus.s"')
    stage(one, "a", "1")
    assert commit(one, 0, "a", events=1)
    assert [n.channel for n in listener.conn.notifies(timeout=10, stop_after=1)] == ["postbus.s"]


def test_into_a_queue(one: Session) -> None:
    one.rows("select postbus.create_queue('jobs', '{\"max_size\": 3}')")
    stage(one, "a", "1", "2")
    assert commit(one, 0, "a", events=2, to="queue => 'jobs', priority => 5, delay => '0 seconds'")
    assert one.value("select array_agg(payload) from postbus.receive('jobs', 10)") == ["1", "2"]
    stage(one, "b", "3", "4")
    with refused("PB006"):
        commit(one, 1, "b", events=2, to="queue => 'jobs'")
    with refused("PB001", "nowhere"):
        commit(one, 1, "b", events=2, to="queue => 'nowhere'")
    with refused("PB003", "a stream or a queue"):
        commit(one, 1, "b", events=2, to="stream => 's', queue => 'jobs'")
    with refused("PB003", "arrays of one length"):
        one.rows("select postbus.stage('x', 0, array['a'], keys => array['a', 'b'])")
    for wrong in (
        "array['a', null]",
        "blobs => array[null::bytea]",
        "array['a'], types => array[null::text]",
    ):
        with refused("PB003", "is null"):
            one.rows(f"select postbus.stage('x', 0, {wrong})")


def test_two_drivers_of_one_query(bus: Bus, one: Session) -> None:
    other = bus.session()
    stage(one, "a", "1")
    stage(one, "b", "1")
    one.begin()
    assert commit(one, 0, "a", events=1)
    with bus.blocked(other, lambda: commit(other, 0, "b", events=1)) as second:
        one.commit()
    assert second.result() is False
    assert payloads(one.consume()) == ["1"]


def test_what_nobody_commits_is_swept(bus: Bus, one: Session) -> None:
    stage(one, "old", "x")
    bus.wait(23 * 3600)
    stage(one, "young", "x")
    assert "swept" not in one.maintain()
    bus.wait(2 * 3600)
    assert one.maintain()["swept"] == 1
    assert one.value("select array_agg(attempt) from postbus.staged") == ["young"]
