"""A test that cannot fail proves nothing: break each rule of the queue engine and see the fault.

Schedules run twice, on the intact engine (nothing is wrong) and on the broken one (the fault is there).
Where the random stress can find the fault, it has to.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.conftest import Database
from tests.queue_stress import broken
from tests.queue_stress.harness import Plan, Stress
from tests.queue_stress.ledger import Connection
from tests.stress.conftest import FreshDatabase
from tests.stress.sessions import value, wait_until_blocked

Patch = Callable[[Connection], None]


def keyed_queue(db: Database, *patches: Patch) -> Connection:
    c = db.connect()
    c.execute("select postbus.create_queue('q')")
    c.execute("select postbus.set_key_policy('q', concurrency => 10)")
    for patch in patches:
        patch(c)
    return c


def send(c: Connection, payload: str, priority: int = 0) -> None:
    c.execute("select postbus.send('q', %s::text, key => 'k', priority => %s)", [payload, priority])


def receive(c: Connection) -> list[Any]:
    return [r[0] for r in c.execute("select payload from postbus.receive('q', 10)").fetchall()]


def wake_while_the_key_is_made(db: Database, *patches: Patch) -> list[Any]:
    """A claim makes the row of a new key and is open; a message comes; somebody else looks; what then?"""
    c = keyed_queue(db, *patches)
    x = db.connect(autocommit=False)
    send(c, "first")
    assert receive(x) == ["first"]
    send(c, "second")
    assert receive(c) == []
    x.commit()
    return receive(c)


def test_wakes_wait_for_their_key(db: Database) -> None:
    assert wake_while_the_key_is_made(db) == ["second"]


def test_without_a_look_at_the_key_wakes_are_lost(db: Database) -> None:
    assert wake_while_the_key_is_made(db, broken.wakes_of_locked_keys_deleted) == []


def new_priority_during_a_claim(db: Database, patch: Patch) -> list[Any]:
    """A claim has begun; the first message of a priority commits; the claim goes on. Who gets the message?"""
    c = keyed_queue(db, patch)
    x = db.connect()
    producer = db.connect(autocommit=False)
    producer.execute("select 1")  # what it sends is due from now on, before the claim begins
    gate = db.connect(autocommit=False)
    gate.execute("select pg_advisory_xact_lock(%s)", [broken.GATE])
    got: list[Any] = []
    claim = threading.Thread(target=lambda: got.extend(receive(x)))
    claim.start()
    try:
        wait_until_blocked(c, x)
        send(producer, "urgent", priority=7)
        producer.commit()
    finally:
        gate.commit()
        claim.join()
    return got + receive(c) + receive(c)


def test_priorities_are_read_after_the_wakes(db: Database) -> None:
    assert new_priority_during_a_claim(db, broken.gate_before_the_wakes) == ["urgent"]


def test_priorities_read_before_the_wakes_leave_a_message_behind(db: Database) -> None:
    assert new_priority_during_a_claim(db, broken.levels_before_the_wakes) == []


def ack_during_a_claim(db: Database, patch: Patch) -> list[Any]:
    """A claim has begun to look; another takes the first message and acks it. Does the ack wait?"""
    c = db.connect()
    c.execute("select postbus.create_queue('q')")
    patch(c)
    c.execute("select postbus.send_batch('q', array['first', 'second'])")
    slow = db.connect(autocommit=False)
    slow.execute("set test.gate = 'on'")
    gate = db.connect(autocommit=False)
    gate.execute("select pg_advisory_xact_lock(%s)", [broken.GATE])
    got: list[Any] = []
    claim = threading.Thread(
        target=lambda: got.extend(slow.execute("select payload from postbus.receive('q', 1)").fetchall())
    )
    claim.start()
    try:
        wait_until_blocked(c, slow)
        receipt = value(c, "select receipt from postbus.receive('q', 1)")
    finally:
        gate.commit()
        claim.join()
    assert got == [("second",)]
    c.execute("set lock_timeout = '500 ms'")
    try:
        return [value(c, "select postbus.ack(%s::text)", receipt)]
    finally:
        slow.rollback()


def test_an_ack_does_not_wait_for_claims(db: Database) -> None:
    assert ack_during_a_claim(db, broken.gate_in_the_claim) == [1]


def test_claims_that_lock_what_others_took_hold_their_acks_up(db: Database) -> None:
    with pytest.raises(psycopg.errors.LockNotAvailable):
        ack_during_a_claim(db, broken.claims_lock_what_others_took)


def workers_die(db: Database, *patches: Patch) -> list[int]:
    """The attempts of a message whose workers always die."""
    c = keyed_queue(db, *patches)
    c.execute("select postbus.alter_queue('q', '{\"max_attempts\": 2}')")
    send(c, "poison")
    attempts = []
    for _ in range(5):
        attempts += [
            r[0] for r in c.execute("select attempt from postbus.receive('q', lease => '1 us')").fetchall()
        ]
    return attempts


def test_attempts_are_capped_in_the_claim(db: Database) -> None:
    assert workers_die(db) == [1, 2]
    assert value(db.connect(), "select count(*) from postbus.dead_letters('q')") == 1


def test_without_the_cap_a_poison_message_comes_for_ever(db: Database) -> None:
    assert workers_die(db, broken.attempts_not_capped) == [1, 2, 3, 4, 5]


# The random stress finds what it can find.


@pytest.mark.parametrize(
    ("patch", "fault", "queues"),
    [
        (broken.claim_kept_on_nack, "after its nack|receipt used twice", ["plain", "keyed"]),
        (broken.claim_not_compared, "late receipt accepted|delivered after its end", ["plain", "keyed"]),
        (broken.running_not_counted, "more than . at once", ["keyed"]),
        (broken.attempts_not_capped, "more attempts than allowed", ["mixed", "keyed"]),
    ],
)
def test_stress_finds_it(fresh: FreshDatabase, patch: Patch, fault: str, queues: list[str]) -> None:
    found = []
    for seed in range(1, 9):
        plan = Plan(
            seed, 1.0, queues=queues, kills=False, meddle=False, stall=1.5, patch=patch, leases=(0.03,)
        )
        with fresh() as db:
            result = Stress(db.dsn, plan).run()
        found.append(str(result))
        if any(re.search(fault, f"{v.rule} {v.detail}") for v in result.violations):
            return
    pytest.fail("not found:\n" + "\n".join(found))
