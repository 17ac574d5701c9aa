"""What a call costs: claims and finishing by EXPLAIN (ANALYZE, BUFFERS) of every statement in them.

One queue has a million messages ready, 200,000 delayed and 20,000 in flight; others have priorities and
keys. Nobody has analysed anything. The plans come from auto_explain, which reports the statements inside
functions as they ran.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Database, _fresh
from tests.queue.explained import LARGE, explained
from tests.queue.work import Desk, Office, Work

READY, DELAYED, IN_FLIGHT = 1_000_000, 200_000, 20_000
LEVELS = (0, 5, 9)
KEYS = 5_000
# How a message that is named by its receipt or id is found.
FINISH = {"queued_id", "Tid Scan"}
KEYED = 4  # times as many blocks where keys have to be looked at and written too
DEAD = 20_000

_FILL = """
do $$ begin
  for i in 1 .. {chunks} loop
    perform postbus.send_batch('{queue}', array_fill('payload'::text, array[{chunk}]){options});
    commit;
  end loop;
end $$"""
_KEYED = """
select postbus.send_batch('keyed', array_fill('payload'::text, array[%s]),
  keys => array(select 'key' || i from generate_series(1, %s) i))"""
# As a claim leaves them, without the dead rows that a vacuum would have removed by then.
_IN_FLIGHT = """
insert into postbus.queued (id, due, created_at, queue_id, claim, attempt, type, payload, worker)
select nextval('postbus.message_id'), postbus.now_() + interval '1 hour', postbus.now_(), q.id, 1, 1,
  'default', 'payload', 'w'
from postbus.queue q, generate_series(1, %s) where q.name = 'large'"""


def fill(s: Desk, queue: str, count: int, options: str = "", chunk: int = 10_000) -> None:
    s.rows(_FILL.format(queue=queue, chunks=count // chunk, chunk=chunk, options=options))


def receipts(work: list[Work]) -> list[str]:
    return [m.receipt for m in work]


@pytest.fixture(scope="module")
def office(server_dsn: str, template: str) -> Iterator[Office]:
    for db in _fresh(server_dsn, template):
        office = Office(db)
        s = office.session()
        for table in LARGE:
            s.rows(f"alter table postbus.{table} set (autovacuum_enabled = off)")
        s.rows("set synchronous_commit = off")
        s.queue("large")
        s.rows(_IN_FLIGHT, IN_FLIGHT)
        fill(s, "large", READY)
        fill(s, "large", DELAYED, ", delay => '1 hour'")
        s.queue("behind")
        fill(s, "behind", 20_000, ", delay => '1 hour'")
        s.queue("levels")
        for level in LEVELS:
            fill(s, "levels", 10_000, f", priority => {level}")
            fill(s, "levels", 10_000, f", priority => {level}, delay => '1 hour'")
        s.queue("keyed")
        s.policy(of="keyed", concurrency=1)
        for _ in range(2):
            s.rows(_KEYED, KEYS, KEYS)
        blocked = 0
        while page := s.receive(10_000, "keyed", lease="1 hour"):
            blocked += len(page)
        assert blocked == KEYS
        s.rows("vacuum postbus.key_state, postbus.key_wake")
        yield office


@pytest.fixture(scope="module")
def s(office: Office) -> Desk:
    """One session for all: functions are compiled once, and plans go generic as they do in a worker."""
    return office.session()


def test_nobody_analysed(s: Desk) -> None:
    """Or the other tests prove nothing."""
    assert (
        s.rows(
            "select c.relname from pg_class c where c.relnamespace = 'postbus'::regnamespace"
            " and c.relname = any (%s) and exists (select from pg_statistic x where x.starelid = c.oid)",
            list(LARGE),
        )
        == []
    )
    assert s.value("select reltuples <= 0 from pg_class where oid = 'postbus.queued'::regclass")
    assert s.value("select count(*) from postbus.queued") > READY + DELAYED


@pytest.mark.parametrize("max", [1, 10, 100])
def test_claim(s: Desk, max: int) -> None:
    # What a slow claim does; the first time it reads the catalogs too.
    s.rows("select postbus._note_walk(id, 0, '-infinity', now()) from postbus.queue where name = 'large'")
    for last in (False, False, True):
        run = explained(s, s.receive, max, "large")
        assert len(run.result) == max
        assert run.paths("queued") == {"queued_due", "Tid Scan"}
        assert run.rows("queued_due") <= max + 1  # a slow claim looks why
        assert s.ack(*receipts(run.result)) == max
        if last:
            run.check(max)


def test_claim_that_finds_nothing(s: Desk) -> None:
    s.receive(10, "behind")
    run = explained(s, s.receive, 10, "behind")
    assert run.result == []
    assert run.paths("queued") == {"queued_due", "Tid Scan"}
    run.check(0)


def test_claim_by_priority(s: Desk) -> None:
    s.receive(1, "levels")
    for n in (1, 10, 100):
        run = explained(s, s.receive, n, "levels")
        assert [m.priority for m in run.result] == [9] * n
        assert run.paths("queued") == {"queued_due", "Tid Scan"}
        assert run.rows("queued_due") <= n + 2 * len(LEVELS)
        run.check(n)


def test_claim_under_a_held_snapshot(office: Office) -> None:
    """Dead entries of finished messages are jumped over once a claim has had to walk them."""
    s = office.session()
    s.queue("walked")
    s.rows("select set_config('postbus.fake_now', (clock_timestamp() - interval '1 minute')::text, false)")
    fill(s, "walked", DEAD)
    old = office.session().begin("repeatable read")
    try:
        while page := s.receive(5_000, "walked"):
            assert s.ack(*receipts(page)) == len(page)
        s.rows("reset postbus.fake_now")  # whether a walk was long is told by the real clock
        runs = []
        for _ in range(6):
            s.send_many(10, to="walked")
            runs.append(explained(s, s.receive, 10, "walked"))
            assert s.ack(*receipts(runs[-1].result)) == 10
    finally:
        old.rollback()
    first, *later = runs
    assert first.blocks > DEAD / 100, "there was nothing to walk"
    # One a second reads everything again.
    min(later, key=lambda run: run.blocks).check(10)


@pytest.mark.parametrize("max", [1, 10, 100])
def test_claim_by_key(s: Desk, max: int) -> None:
    """What blocked keys hold is never looked at."""
    keys = [f"z{max}_{i}" for i in range(max)]  # beyond all blocked ones
    for last in (False, False, True):
        s.send_all(*["p"] * max, to="keyed", keys=keys)
        run = explained(s, s.receive, max, "keyed")
        assert sorted(m.key or "" for m in run.result) == sorted(keys)
        assert run.paths("key_wake") == {"key_wake_queue"}
        assert "key_state_pkey" in run.paths("key_state") <= {"key_state_ready", "key_state_pkey"}
        assert run.paths("queued") - {"queued_due"} == {
            "queued_key",
            "Tid Scan",
        }  # the other: messages without a key
        done = explained(s, s.ack, *receipts(run.result))
        assert done.result == [max]
        assert done.paths("queued") <= FINISH
        if last:
            run.check(max, KEYED)
            done.check(max)


def test_new_keys_beside_many(office: Office, s: Desk) -> None:
    """Each new key is looked up, not compared with all keys that there are."""
    s.rows("vacuum postbus.key_state, postbus.key_wake")
    worker = office.session()  # plans anew
    for last in (False, True):
        keys = [f"z{last}_{i}" for i in range(64)]
        s.send_all(*["p"] * 64, to="keyed", keys=keys)
        run = explained(worker, worker.receive, 64, "keyed")
        assert sorted(m.key or "" for m in run.result) == sorted(keys)
        assert s.ack(*receipts(run.result)) == 64
        if last:
            run.check(64, 2 * KEYED)  # a new key is written more often


def test_claim_by_key_with_many_wakes(s: Desk) -> None:
    """Producers that are far ahead: wakes are folded a window at a time."""
    s.queue("woken")
    s.policy(of="woken", concurrency=1)
    s.rows(_KEYED.replace("keyed", "woken"), KEYS, KEYS)
    for last in (False, False, True):
        run = explained(s, s.receive, 1, "woken")
        assert len(run.result) == 1
        if last:
            run.check(64)  # wakes


@pytest.mark.parametrize("n", [1, 10, 100])
def test_finish(s: Desk, n: int) -> None:
    for last in (False, True):
        work = s.receive(n, "large")
        run = explained(s, s.ack, *receipts(work))
        assert run.result == [n]
        assert run.paths("queued") <= FINISH
        if last:
            run.check(n)


@pytest.mark.parametrize("n", [1, 10, 100])
def test_give_back_and_extend(s: Desk, n: int) -> None:
    for last in (False, True):
        held = receipts(s.receive(n, "large"))
        later = explained(s, s.extend, *held, lease="1 hour")
        assert later.paths("queued") <= FINISH
        back = explained(s, s.give_back, *held, delay=60)
        assert back.result == [n]
        assert back.paths("queued") <= FINISH
        if last:
            later.check(n)
            back.check(n)


@pytest.mark.parametrize("n", [1, 10, 100])
def test_give_up(s: Desk, n: int) -> None:
    for last in (False, True):
        held = receipts(s.receive(n, "large"))
        run = explained(s, s.give_up, *held)
        assert run.result == [n]
        assert run.paths("queued") <= FINISH
        if last:
            run.check(n)


def test_cancel(s: Desk) -> None:
    """Of what is delayed; for messages that are ready, the queue is looked through."""
    for last in (False, True):
        ids = s.send_all(*["p"] * 10, to="large", delay="1 hour")
        run = explained(s, s.value, "select postbus.cancel('large', %s::bigint[])", ids)
        assert run.result == ids
        assert run.paths("queued") <= FINISH
        if last:
            run.check(10)


@pytest.mark.parametrize("queue", ["large", "behind", "levels", "keyed"])
def test_next_due(s: Desk, queue: str) -> None:
    for last in (False, True):
        run = explained(s, s.value, "select postbus.next_due(%s)", queue)
        assert run.result[0] is not None
        if last:
            run.check(0)


def test_new_database(db: Database) -> None:
    """The same plans where the tables are empty and the planner knows nothing at all."""
    s = Office(db).session()
    s.queue()
    s.queue("keyed")
    s.policy(of="keyed", concurrency=1)
    for sent in (0, 5, 0, 5):
        s.send_many(sent)
        s.send_all(*["p"] * sent, to="keyed", keys=[f"k{i}" for i in range(sent)])
        run = explained(s, s.receive, 10)
        assert len(run.result) == sent
        assert run.paths("queued") == {"queued_due", "Tid Scan"}
        keyed = explained(s, s.receive, 10, "keyed")
        assert len(keyed.result) == sent
        assert keyed.paths("key_state") <= {"key_state_ready", "key_state_pkey"}
        assert keyed.paths("key_wake") <= {"key_wake_queue"}
        if sent:
            assert "queued_key" in keyed.paths("queued")
            work = receipts(run.result) + receipts(keyed.result)
            done = explained(s, s.ack, *work)
            assert done.paths("queued") <= FINISH
    run.check(sent)
    keyed.check(sent, KEYED)
    done.check(2 * sent)
