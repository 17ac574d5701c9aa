"""Figures for polling: queue_stats, stream_stats, group_stats, metrics. Exact while small, always bounded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Database, run_sql
from tests.engine.bus import refused
from tests.queue.work import Desk, Office


@pytest.fixture
def bus(db: Database) -> Office:
    return Office(db)


@pytest.fixture
def s(bus: Office) -> Desk:
    return bus.session()


def queue(s: Desk, name: str = "q", count_to: int = 1000) -> dict[str, Any]:
    return dict(s.value("select to_jsonb(x) from postbus.queue_stats(%s) x where queue = %s", count_to, name))


def group(s: Desk, name: str = "g", count_to: int = 1000) -> dict[str, Any]:
    query = 'select to_jsonb(x) from postbus.group_stats(%s) x where "group" = %s'
    return dict(s.value(query, count_to, name))


def stream(s: Desk, name: str = "s") -> dict[str, Any]:
    return dict(s.value("select to_jsonb(x) from postbus.stream_stats() x where stream = %s", name))


def blocks(s: Desk, call: str) -> int:
    ((plan,),) = s.rows(f"explain (analyze, buffers, timing off, format json) select * from {call}")
    top = plan[0]["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


@pytest.mark.parametrize("kind", ["plain", "priorities", "keyed", "unlogged", "archive"])
def test_states_of_a_small_queue_are_exact(bus: Office, s: Desk, kind: str) -> None:
    s.queue_of_kind(kind)
    s.send_all("a", "b", "c", keys=["x", "y", "z"])
    s.send("urgent", key="u", priority=0 if kind == "plain" else 7)
    s.send("later", key="l", delay="1 hour")
    bus.wait(30)
    s.send("new", key="n")
    assert len(s.receive(1)) == 1
    found = queue(s)
    assert (found["ready"], found["delayed"], found["in_flight"], found["depth"]) == (4, 1, 1, 6)
    assert found["oldest_seconds"] == found["ready_seconds"] == 30
    assert (found["estimated"], found["paused"]) == (False, False)
    bus.wait(60)  # the lease is over: the message is ready, as old as it is
    assert queue(s)["ready"] == 5
    assert queue(s)["in_flight"] == 0
    s.rows("select postbus.pause('q')")
    assert queue(s)["paused"]


def test_oldest_is_since_it_was_sent_and_ready_since_it_was_due(bus: Office, s: Desk) -> None:
    s.queue()
    s.send("later", delay="1 hour")
    bus.wait(3600 + 5)
    found = queue(s)
    assert (found["oldest_seconds"], found["ready_seconds"]) == (3605, 5)
    s.drain()
    found = queue(s)
    assert (found["oldest_seconds"], found["ready_seconds"]) == (0, 0)


def test_dead_letters_and_expired_messages_are_counted(bus: Office, s: Desk) -> None:
    s.queue(max_attempts=1)
    s.send_many(3)
    s.die()
    s.receive()
    s.send("old", ttl="1 second")
    bus.wait(2)
    s.maintain()
    found = queue(s)
    assert (found["dead_letters"], found["expired"], found["depth"]) == (3, 1, 0)


def test_large_queues_are_estimated_and_small_ones_beside_them_exact(s: Desk) -> None:
    for name in ("big", "later", "small"):
        s.queue(name)
    for _ in range(20):
        s.send_many(1000, to="big")
        s.send_all(*"x" * 500, to="later", delay="1 hour")
    s.send_many(7, to="small")
    s.receive(2, of="small")
    found = queue(s, "small")
    assert (found["ready"], found["in_flight"], found["estimated"]) == (5, 2, False)
    found = queue(s, "big")
    assert found["estimated"]
    assert found["ready"] == pytest.approx(20_000, rel=0.2)
    assert found["delayed"] == found["in_flight"] == 0
    found = queue(s, "later")
    assert found["delayed"] == pytest.approx(10_000, rel=0.3)
    assert found["ready"] == 0
    # Up to where one wants it, it is exact.
    assert (queue(s, "big", 20_001)["ready"], queue(s, "big", 20_001)["estimated"]) == (20_000, False)
    with refused("PB003", "count_to"):
        queue(s, "big", 0)


def test_estimate_of_an_unlogged_queue(s: Desk) -> None:
    s.queue(unlogged_unsafe=True)
    s.send_many(5000)
    found = queue(s)
    assert found["estimated"]
    assert found["ready"] == pytest.approx(5000, rel=0.01)  # it has fewer pages than are looked at


def test_cost_does_not_grow_with_the_backlog(s: Desk) -> None:
    """Nobody has analysed these tables."""
    s.rows("alter table postbus.queued set (autovacuum_enabled = off)")
    s.queue()
    s.queue("keyed")
    s.policy(of="keyed", concurrency=1)
    s.stream(lanes=4)
    for ordering in ("key", "stream"):
        s.group(ordering, ordering=ordering)
    calls = ("postbus.queue_stats()", "postbus.group_stats()", "postbus.stream_stats()", "postbus.metrics()")
    costs = []
    for size in (4000, 100_000):
        for _ in range(size // 4000):
            s.send_many(4000)
            s.send_all(*"x" * 400, to="keyed", keys=[f"k{i}" for i in range(400)])
            s.fill(4000, keys=100)
        costs.append([blocks(s, call) for call in calls])
    for call, few, many in zip(calls, *costs, strict=True):
        assert many <= 2 * few + 1000, call
        assert many <= 20_000, call


@pytest.mark.parametrize("priority", [0, 3])
def test_counts_begin_where_claims_do(bus: Office, s: Desk, priority: int) -> None:
    """Behind a mark are the entries of finished messages; what else is there, claims find a little later."""
    s.queue()
    s.send("behind", priority=priority)
    bus.wait(3600)
    if priority:
        s.rows(
            "insert into postbus.mark select id, %s, 1, postbus.now_(), postbus.now_() from postbus.queue",
            priority,
        )
        s.rows("select postbus._set_bits(register, 1024, 0) from postbus.queue")
    else:
        s.rows(
            "select setval(head, (extract(epoch from postbus.now_()) * 1000)::bigint << 20)"
            " from postbus.queue"
        )
    s.send_all("a", "b", priority=priority)
    assert queue(s)["ready"] == 2
    if priority:
        s.rows("delete from postbus.mark")
    else:
        s.rows("select setval(head, 0) from postbus.queue")
    assert queue(s)["ready"] == 3


def test_figures_that_took_long_are_kept_for_a_while(bus: Office, s: Desk) -> None:
    """Many finished messages of keys, which an old snapshot keeps: not walked over at every poll."""
    s.queue()
    s.policy(concurrency=10_000)
    old = bus.session().begin("repeatable read")
    for _ in range(2):
        s.send_all(*"x" * 6000, keys=["k"] * 6000)
        s.drain(6000)
    assert queue(s, count_to=2)["ready"] == 0
    s.send("new", key="k")
    assert queue(s, count_to=2)["ready"] == 0
    assert queue(bus.session(), count_to=2)["ready"] == 1
    old.rollback()


def test_pending_and_lag_need_no_tick(bus: Office, s: Desk) -> None:
    s.stream(lanes=4)
    s.group()
    s.group("total", ordering="stream")
    bus.wait(3600)  # an idle hour is no lag
    s.fill(10, keys=5)
    bus.wait(7)
    s.fill(10, keys=5)
    for name in ("g", "total"):
        found = group(s, name)
        assert (found["pending"], found["lag_seconds"], found["estimated"]) == (20, 7, False)
    while s.consume(100):
        pass
    found = group(s)
    assert (found["pending"], found["lag_seconds"], found["in_flight"], found["overdue"]) == (0, 0, 20, 0)
    bus.wait(31)
    found = group(s)
    assert (found["in_flight"], found["overdue"]) == (0, 20)
    assert group(s, "total")["pending"] == 20


def test_rolled_back_and_open_events_are_not_pending(bus: Office, s: Desk) -> None:
    s.stream()
    s.group()
    other = bus.session().begin()
    other.fill(5)
    assert group(s)["pending"] == 0
    s.publish("there")
    assert group(s)["pending"] == 1
    other.rollback()
    assert group(s)["pending"] == 1
    s.take()
    assert group(s)["pending"] == 0


def test_page_by_page(s: Desk) -> None:
    s.stream()
    s.group()
    s.fill(100)
    for left in (70, 40, 10):
        s.ack(s.consume(30)[0].batch)
        assert group(s)["pending"] == left


def test_waiting_and_dead_messages_of_a_group(bus: Office, s: Desk) -> None:
    s.stream()
    s.group(max_attempts=2, backoff=60, ordering="none")
    s.fill(2)
    one, two = s.consume()
    s.nack(one.receipt)
    s.rows("select postbus.dead_letter(%s::text)", two.receipt)
    found = group(s)
    assert (found["waiting"], found["dead_letters"], found["in_flight"]) == (1, 1, 0)


def test_many_events_are_estimated_from_ids(s: Desk) -> None:
    s.stream(lanes=2)
    s.group()
    for _ in range(5):
        s.fill(1000, keys=50)
    found = group(s)
    assert found["estimated"]
    assert found["pending"] == pytest.approx(5000, rel=0.02)
    assert group(s, count_to=10_000) | {"active_at": 0} == found | {
        "estimated": False, "pending": 5000, "active_at": 0,
    }  # fmt: skip


def test_of_many_lanes_some_are_looked_at(bus: Office, s: Desk) -> None:
    s.stream(lanes=100)
    s.group()
    s.fill(2000, keys=1000)
    bus.wait(3)
    found = group(s)
    assert found["estimated"]
    assert found["pending"] == pytest.approx(2000, rel=0.3)
    assert found["lag_seconds"] == 3


def test_lane_change_with_a_backlog(s: Desk) -> None:
    s.stream(lanes=2)
    s.group()
    s.fill(50, keys=20)
    s.alter(lanes=5)
    s.maintain(2)
    s.fill(50, keys=20)
    assert group(s)["pending"] == 100
    s.take()
    assert group(s)["pending"] == 0
    s.fill(10, keys=20)
    assert group(s)["pending"] == 10


def test_expired_events_are_counted_with_and_without_upkeep(bus: Office, s: Desk) -> None:
    s.stream(event_ttl=10)
    s.group()
    s.fill(5)
    bus.wait(11)
    s.publish("new")
    s.take()
    assert group(s)["expired"] == 5
    s.maintain(3)
    assert group(s)["expired"] == 5


def test_stream_figures(bus: Office, s: Desk) -> None:
    s.stream(lanes=3)
    s.group()
    s.fill(10)
    s.publish("later", deliver_at="2031-01-01 00:00:00+00")
    found = stream(s)
    assert (found["sent"], found["events"], found["scheduled"], found["groups"]) == (11, 0, 1, 1)
    assert (found["lanes"], found["segments"], found["segments_used"], found["paused"]) == (3, 3, 1, False)
    assert found["per_second"] is None  # nothing to compare with yet
    s.maintain()
    bus.wait(100)
    s.fill(50)
    s.maintain()
    found = stream(s)
    assert (found["sent"], found["events"]) == (61, 60)
    assert found["per_second"] == pytest.approx(0.5)
    assert found["size_bytes"] > 0


def test_sent_only_grows(bus: Office, s: Desk) -> None:
    s.stream()
    s.queue()
    seen = []
    query = (
        "select value from postbus.metrics() where name = 'postbus.message.sent_total' order by labels::text"
    )
    for step in range(4):
        other = bus.session().begin()
        other.fill(3)
        other.rows("select postbus.send('q', 'x')")
        if step % 2:
            other.rollback()
        else:
            other.commit()
        s.drain()
        seen.append([int(value) for (value,) in s.rows(query)])
    assert seen == sorted(seen)
    assert seen[-1] == [4, 12]


def test_metrics_are_the_figures(s: Desk) -> None:
    s.queue()
    s.send_many(3)
    s.stream()
    s.group()
    s.fill(4)
    found = {
        (name, tuple(sorted(labels.items()))): (kind, value)
        for name, kind, value, labels in s.rows("select * from postbus.metrics()")
    }
    of_queue, of_group = (("queue", "q"),), (("group", "g"), ("stream", "s"))
    assert found["postbus.queue.depth", of_queue] == ("gauge", 3)
    assert found["postbus.queue.oldest_message_age_seconds", of_queue] == ("gauge", 0)
    assert found["postbus.message.sent_total", (("stream", "s"),)] == ("counter", 4)
    assert found["postbus.message.sent_total", (("queue", "*"),)] == ("counter", 3)
    assert found["postbus.consumer.pending_events", of_group] == ("gauge", 4)
    assert found["postbus.consumer.lag_seconds", of_group] == ("gauge", 0)
    assert found["postbus.message.dead_lettered", of_group] == ("gauge", 0)
    assert {kind for kind, _ in found.values()} == {"gauge", "counter"}
    assert len(found) == len(s.rows("select * from postbus.metrics()")), "one series, one row"


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_looking_writes_nothing(s: Desk, level: str) -> None:
    s.queue()
    s.send_many(3)
    s.stream(lanes=3)
    s.group()
    s.fill(4, keys=3)
    s.rows(f"begin transaction isolation level {level} read only")
    for call in ("metrics", "health", "stuck_groups", "queue_stats", "stream_stats", "group_stats"):
        s.rows(f"select * from postbus.{call}()")
    assert s.value("select pg_current_xact_id_if_assigned()") is None
    s.commit()


def test_readers_may_look(bus: Office, s: Desk, server_dsn: str) -> None:
    role = f"looks_at_{bus.db.name}"
    run_sql(server_dsn, "create role {} login in role postbus_reader", role)
    try:
        reader = bus.db.connect(user=role)
        for call in ("metrics", "health", "stuck_groups", "queue_stats", "stream_stats", "group_stats"):
            reader.execute(f"select * from postbus.{call}()".encode())
    finally:
        bus.db.close()
        run_sql(server_dsn, "drop role {}", role)
