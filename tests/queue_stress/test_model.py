"""The queue engine against a model, step by step, in schedules that Hypothesis makes up.

POSTBUS_MODEL_EXAMPLES makes it longer (it is 25), and then different each time.
"""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from tests.conftest import Database
from tests.engine.bus import Bus, Session, refused
from tests.queue_stress.model import AGEING, MAX_ATTEMPTS, Message, Queue

EXAMPLES = int(os.environ.get("POSTBUS_MODEL_EXAMPLES", "25"))
DERANDOMIZE = "POSTBUS_MODEL_EXAMPLES" not in os.environ
STEPS = 15

KEYS = [None, "a", "b", "c"]
SEEDS = st.integers(0, 2**32)
EVERYDAY = {
    "send": 6,
    "send_batch": 4,
    "receive": 10,
    "pop": 1,
    "settle": 12,
    "cancel": 2,
    "pass_time": 4,
    "maintain": 1,
    "redrive": 1,
}
VERBS = ["ack", "ack", "nack", "nack", "release", "extend", "dead_letter", "stale"]


class Machine(RuleBasedStateMachine):
    bus: Bus
    s: Session
    examples = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.queue = f"q{self.examples}"
        self.model = Queue(False, self.bus.now)
        self.s.rows("select setseed(0.5)")  # keys or no keys first is left to chance

    def call(self, query: str, *args: Any) -> Any:
        return self.s.value(f"select postbus.{query}", *args)

    def peek(self) -> dict[int, Any]:
        query = "select id, state, attempt, due, priority, key from postbus.peek(%s, max => 1000)"
        return {r[0]: r for r in self.s.rows(query, self.queue)}

    @initialize(keep=st.booleans(), archive=st.booleans())
    def begin(self, keep: bool, archive: bool) -> None:
        options = {
            "max_attempts": MAX_ATTEMPTS,
            "backoff": 2,
            "max_backoff": 4,
            "ageing": AGEING.total_seconds(),
            "keep_expired": keep,
            "on_ack": "archive" if archive else "delete",
        }
        self.call("create_queue(%s, %s)", self.queue, Jsonb(options))
        self.model.keep_expired = keep

    @rule(seed=SEEDS)
    def live(self, seed: int) -> None:
        """A stretch of everyday life. Every other rule ends with one.

        It is rolled from one seed: drawn piece by piece, runs get short; and of rules of their own Hypothesis
        leaves most out in most runs.
        """
        dice = random.Random(seed)
        for what in dice.choices(list(EVERYDAY), list(EVERYDAY.values()), k=dice.randint(3, 10)):
            getattr(self, what)(dice)
            self.figures_agree()

    # Sending.

    def written(self, ids: list[int], keys: list[str | None], **named: Any) -> None:
        for id_, key in zip(ids, keys, strict=True):
            assert id_ > max(self.model.messages, default=0)
            keyed = self.model.keyed and key is not None
            self.model.messages[id_] = Message(id=id_, key=key, keyed=keyed, **named)

    def send(self, dice: random.Random) -> None:
        key, kind, priority = dice.choice(KEYS), dice.choice("xxy"), dice.choice([0, 0, 0, 1, 9])
        delay, ttl = dice.choice([None, None, 0, 3]), dice.choice([None, None, None, 5])
        id_ = self.call(
            "send(%s, 'p'::text, type => %s, key => %s, priority => %s, delay => make_interval(secs => %s),"
            " ttl => make_interval(secs => %s))",
            *(self.queue, kind, key, priority, delay, ttl),
        )
        due = self.bus.now + timedelta(seconds=delay or 0)
        expires_at = None if ttl is None else due + timedelta(seconds=ttl)
        self.written([id_], [key], type=kind, priority=priority, due=due, expires_at=expires_at)

    def send_batch(self, dice: random.Random) -> None:
        keys = dice.choices(KEYS, k=dice.randint(1, 5))
        query = "send_batch(%s, %s::text[], keys => %s::text[])"
        ids = self.call(query, self.queue, ["p"] * len(keys), keys)
        self.written(ids, keys, type="default", priority=0, due=self.bus.now, expires_at=None)

    # Receiving.

    def receive_some(self, size: int, lease: int, kind: str | None) -> list[Message]:
        rows = self.s.rows(
            "select id, receipt, attempt, state, key, priority"
            " from postbus.receive(%s, %s, make_interval(secs => %s), type => %s)",
            *(self.queue, size, lease, kind),
        )
        self.model.received([r[0] for r in rows], size, kind)
        got = [self.model.take(r[0], r[1], self.bus.now + timedelta(seconds=lease)) for r in rows]
        state = [(m.attempt, m.state, m.key, m.priority) for m in got]
        assert [(r[2], r[3], r[4], r[5]) for r in rows] == state
        self.model.buried(set(self.peek()))
        return got

    def receive(self, dice: random.Random) -> None:
        kind = dice.choice([None, None, None, "x", "y"])
        self.receive_some(dice.choice([1, 2, 3, 100]), dice.choice([3, 20]), kind)

    def pop(self, dice: random.Random) -> None:
        size = dice.choice([1, 3])
        ids = [r[0] for r in self.s.rows("select id from postbus.pop(%s, %s)", self.queue, size)]
        self.model.received(ids, size, None)
        for i in ids:
            self.model.gone(self.model.messages[i])
        self.model.buried(set(self.peek()))

    # Finishing.

    def settle(self, dice: random.Random) -> None:
        out = [m for m in self.model.messages.values() if m.receipt is not None]
        verb = dice.choice(VERBS)
        if verb == "stale":
            self.stale(dice, [m.receipt for m in out if m.receipt is not None])
        elif out:
            getattr(self, verb)(dice, dice.sample(out, dice.randint(1, len(out))))

    def stale(self, dice: random.Random, good: list[str]) -> None:
        """One receipt that is worth nothing spoils the others: nothing is changed."""
        if self.model.stale:
            verb = dice.choice(["ack", "nack", "release", "dead_letter", "extend"])
            receipts = [dice.choice(self.model.stale), *good[:1]]
            with refused("PB004"):
                self.call(f"{verb}(%s::text[])", receipts)

    def ack(self, dice: random.Random, some: list[Message]) -> None:
        assert self.call("ack(%s::text[])", [m.receipt for m in some]) == len(some)
        for m in some:
            self.model.gone(m)

    def nack(self, dice: random.Random, some: list[Message]) -> None:
        delay = dice.choice([None, 0, 5])
        state = dice.choice([None, "half"])
        query = "nack(%s::text[], make_interval(secs => %s), 'again', %s)"
        receipts = [m.receipt for m in some]
        assert self.call(query, receipts, delay, state and Jsonb(state)) == len(some)
        rows = self.peek()
        for m in some:
            if self.model.nack(m, state):
                m.due = rows[m.id][3]
                wait = (m.due - self.bus.now).total_seconds()
                assert 1 <= wait <= 5 if delay is None else wait == delay

    def release(self, dice: random.Random, some: list[Message]) -> None:
        assert self.call("release(%s::text[])", [m.receipt for m in some]) == len(some)
        rows = self.peek()
        for m in some:
            self.model.release(m)
            m.due = rows[m.id][3]
            assert m.due <= self.bus.now

    def dead_letter(self, dice: random.Random, some: list[Message]) -> None:
        assert self.call("dead_letter(%s::text[])", [m.receipt for m in some]) == len(some)
        for m in some:
            self.model.bury(m, expired=False)

    def extend(self, dice: random.Random, some: list[Message]) -> None:
        lease = dice.choice([1, 30])
        self.call("extend(%s::text[], make_interval(secs => %s))", [m.receipt for m in some], lease)
        for m in some:
            m.due = max(m.due, self.bus.now + timedelta(seconds=lease))

    def cancel(self, dice: random.Random) -> None:
        known = sorted({*self.model.messages, *self.model.dead, 1})
        ids = dice.sample(known, min(3, len(known)))
        mine = [self.model.messages[i] for i in ids if i in self.model.messages]
        free = [m for m in mine if not m.out or self.model.ready(m)]
        assert sorted(self.call("cancel(%s, %s::bigint[])", self.queue, ids)) == sorted(m.id for m in free)
        for m in free:
            self.model.gone(m)

    # Everything else.

    def pass_time(self, dice: random.Random) -> None:
        self.wait(dice.choice([1, 4]))

    def wait(self, seconds: int) -> None:
        self.bus.wait(seconds)
        self.model.now = self.bus.now

    def maintain(self, dice: random.Random) -> None:
        self.s.maintain()
        self.model.buried(set(self.peek()))

    def redrive(self, dice: random.Random) -> None:
        rows = self.s.rows("select id, event_id from postbus.dead_letters(%s)", self.queue)
        some = dice.sample(rows, dice.randint(0, len(rows)))
        ids = None if len(some) == len(rows) else [r[0] for r in some]
        assert self.call("redrive(%s, %s::bigint[])", self.queue, ids) == len(some)
        for _, event in some:
            self.model.redrive(self.model.dead[event])

    @rule(seed=SEEDS)
    def wait_long(self, seed: int) -> None:
        self.wait(30)
        self.live(seed)

    @rule(key=st.sampled_from(KEYS), concurrency=st.sampled_from([None, 1, 1, 2]), seed=SEEDS)
    def set_policy(self, key: str | None, concurrency: int | None, seed: int) -> None:
        self.call("set_key_policy(%s, %s, concurrency => %s)", self.queue, key, concurrency)
        self.model.policy(key, concurrency)
        self.live(seed)

    @precondition(lambda self: self.model.own)
    @rule(data=st.data(), seed=SEEDS)
    def unset_policy(self, data: st.DataObject, seed: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.own)))
        self.call("unset_key_policy(%s, %s)", self.queue, key)
        del self.model.own[key]
        self.live(seed)

    @rule(seed=SEEDS)
    def purge(self, seed: int) -> None:
        assert self.call("purge_queue(%s)", self.queue) == len(self.model.messages)
        for m in list(self.model.messages.values()):
            self.model.gone(m)
        self.live(seed)

    @rule(seed=SEEDS)
    def pause(self, seed: int) -> None:
        self.call("pause(%s)", self.queue)
        self.model.paused = True
        self.live(seed)
        self.call("resume(%s)", self.queue)
        self.model.paused = False
        self.live(seed + 1)

    # What always holds.

    @invariant()
    def figures_agree(self) -> None:
        rows = {i: (r[1], r[2], r[3], r[4], r[5]) for i, r in self.peek().items()}
        model = self.model
        mine = {
            m.id: (model.state_of(m), m.attempt, m.due, m.priority, m.key) for m in model.messages.values()
        }
        assert rows == mine
        dead = self.s.rows("select event_id, attempt from postbus.dead_letters(%s, max => 1000)", self.queue)
        assert dict(dead) == {m.id: m.attempt for m in model.dead.values()}
        query = "select expired from postbus.list_queues() where name = %s"
        rows_ = self.s.rows(query, self.queue)
        assert not rows_ or rows_ == [(model.expired,)]

    def teardown(self) -> None:
        """Let everything end: each message is delivered, or has had its attempts."""
        if not self.s.rows("select from postbus.list_queues() where name = %s", self.queue):
            return
        self.call("resume(%s)", self.queue)
        self.model.paused = False
        for _ in range(60):
            if not self.model.messages:
                break
            self.wait(40)
            self.s.maintain()
            self.model.buried(set(self.peek()))
            got = self.receive_some(100, 3, None)
            if got:
                self.ack(random.Random(1), got)
        assert not self.model.messages, f"never delivered: {self.model.messages}"
        self.call("drop_queue(%s, true)", self.queue)


@pytest.mark.timeout(120 if DERANDOMIZE else 0)
def test_queue_does_what_the_model_says(db: Database) -> None:
    bus = Bus(db)
    machine = type("BoundMachine", (Machine,), {"bus": bus, "s": bus.session()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=DERANDOMIZE,
            database=None,
            phases=[Phase.generate] if DERANDOMIZE else [Phase.generate, Phase.shrink],
            deadline=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
