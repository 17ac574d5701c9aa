"""The engine against a model, step by step, in schedules that Hypothesis makes up.

POSTBUS_MODEL_EXAMPLES makes it longer (it is 80), and then different each time.
"""

from __future__ import annotations

import os
import random
from typing import Any

import psycopg
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

from tests.engine.bus import Bus, Session, refused
from tests.engine.model import NOW, Group, Log, Receipt

EXAMPLES = int(os.environ.get("POSTBUS_MODEL_EXAMPLES", "80"))
DERANDOMIZE = "POSTBUS_MODEL_EXAMPLES" not in os.environ
STEPS = 30

KEYS = [None, "a", "b", "c"]
GROUPS = ["key", "stream", "none"]
LEASES = [3, 20]
SEEDS = st.integers(0, 2**32)
POSITIONS = st.sampled_from(["earliest", "latest"])
VERBS = ["ack_batch", "ack", "nack", "nack", "give_up", "extend", "stale"]


class Engine:
    """Sessions that live through all examples; each example has a stream of its own."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.main = bus.session()
        self.producers = [bus.session() for _ in range(3)]
        self.examples = 0


class Machine(RuleBasedStateMachine):
    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        e = self.engine
        e.examples += 1
        self.stream = f"s{e.examples}"
        self.main: Session = e.main
        self.log = Log()
        self.groups: dict[str, Group] = {}
        self.open: dict[int, int] = {}  # producer -> transaction
        self.tx = 0
        for s in [e.main, *e.producers]:
            s.rows("select setseed(0.5)")  # the engine starts at a random lane

    # Small words.

    @property
    def now(self) -> float:
        return self.engine.bus.now.timestamp()

    def call(self, query: str, *args: Any) -> Any:
        return self.main.value(f"select postbus.{query}", *args)

    def tokens(self, name: str) -> set[int]:
        query = 'select batch from postbus.in_flight(%s) where "group" = %s'
        return {int(b[1:]) for (b,) in self.main.rows(query, self.stream, name)}

    def new_transaction(self) -> int:
        self.tx += 1
        return self.tx

    def publish_by(self, s: Session, key: str | None, tx: int) -> None:
        self.log.publish(s.publish("p", key, to=self.stream), key, tx)

    def from_earliest(self) -> set[int]:
        """Committed events that a group at the floor does not get: they are cleaned, or may be any time."""
        kept = self.main.rows(
            "select e.id from postbus.stream s"
            " join postbus.tick f on f.stream_id = s.id and f.id = s.floor_tick"
            " join postbus.log e on e.stream_id = s.id and not pg_visible_in_snapshot(e.txid, f.snapshot)"
            " where s.name = %s",
            self.stream,
        )
        return self.log.committed - {i for (i,) in kept}

    def create(self, name: str, start: str) -> None:
        options = {"ordering": name, "start": start, "max_attempts": 3, "backoff": 2, "max_backoff": 4}
        self.call("create_group(%s, %s, %s)", self.stream, name, Jsonb(options))
        group = self.groups[name] = Group(self.log, name, 3)
        group.place(self.log.committed if start == "latest" else self.from_earliest())

    # Steps.

    @initialize(lanes=st.integers(1, 3))
    def begin(self, lanes: int) -> None:
        options = {"lanes": lanes, "retain": 0, "max_retain": None, "rotate_every": 1}
        self.call("create_stream(%s, %s)", self.stream, Jsonb(options))
        for name in GROUPS:
            self.create(name, "earliest")

    @rule(seed=SEEDS, size=st.integers(1, 12))
    def work(self, seed: int, size: int) -> None:
        """A stretch of everyday life. Rolled from one seed: drawn piece by piece, runs get short."""
        dice = random.Random(seed)
        for _ in range(size):
            what = dice.choice(
                ["publish", "publish", "consume", "consume", "consume", "finish", "finish", "finish"]
            )
            getattr(self, what)(dice)

    more_work = work

    def publish(self, dice: random.Random) -> None:
        tx = self.new_transaction()
        self.publish_by(self.main, dice.choice(KEYS), tx)
        self.log.step += 1
        self.log.commit(tx)
        self.log.step += 1

    def consume(self, dice: random.Random) -> None:
        self.consume_once(dice.choice(GROUPS), dice.choice([1, 2, 5, 100]), dice.choice(LEASES))

    def finish(self, dice: random.Random) -> None:
        groups = [g for g in self.groups.values() if g.leases]
        verb = dice.choice(VERBS)
        if verb == "stale" or not groups:
            self.stale_receipt(dice)
            return
        group = dice.choice(groups)
        getattr(self, verb)(dice, group, dice.choice(sorted(group.leases)))

    @rule(
        who=st.integers(0, 2), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), old=st.booleans()
    )
    def publish_open(self, who: int, keys: list[str | None], old: bool) -> None:
        s = self.engine.producers[who]
        if who not in self.open:
            s.begin("repeatable read" if old else "read committed")
            self.open[who] = self.new_transaction()
        for key in keys:
            self.publish_by(s, key, self.open[who])

    @precondition(lambda self: bool(self.open))
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, commit: bool) -> None:
        who = data.draw(st.sampled_from(sorted(self.open)))
        tx = self.open.pop(who)
        if commit:
            self.engine.producers[who].commit()
            self.log.commit(tx)
        else:
            self.engine.producers[who].rollback()

    def consume_once(self, name: str, max: int, lease: int) -> int | None:
        group = self.groups[name]
        before = set(group.leases)
        page = self.main.consume(max, by=name, of=self.stream, lease=f"{lease} s")
        assert len(page) <= max
        assert len({m.batch for m in page}) <= 1
        group.expired(self.now, self.tokens(name) & before)
        if page:
            token = int(page[0].batch[1:])
            group.delivered(token, [(m.id, m.attempt) for m in page], self.now, self.now + lease)
            return token
        settled = self.main.value(
            "select g.change_id = s.change_id from postbus.group g"
            " join postbus.stream s on s.id = g.stream_id"
            " where s.name = %s and g.name = %s",
            self.stream,
            name,
        )
        if settled or name == "stream":
            group.nothing_to_get(self.now)
        return None

    def ack_batch(self, dice: random.Random, group: Group, token: int) -> None:
        ids = group.leases[token].open
        assert self.call("ack(%s::text)", f"s{token}") == len(ids)
        group.finished(token, ids)

    def ack(self, dice: random.Random, group: Group, token: int) -> None:
        ids = self.some(dice, group.leases[token].open)
        assert self.call("ack(%s::text[])", [f"s{token}:{i}" for i in ids]) == len(ids)
        group.finished(token, ids)

    def nack(self, dice: random.Random, group: Group, token: int) -> None:
        delay = dice.choice([None, 0, 5])
        ids = self.some(dice, group.leases[token].open)
        receipts = [f"s{token}:{i}" for i in ids]
        assert self.call("nack(%s::text[], make_interval(secs => %s))", receipts, delay) == len(ids)
        least, most = (1.5, 5) if delay is None else (delay, delay)
        group.failed(token, ids, (self.now + least, self.now + most))

    def give_up(self, dice: random.Random, group: Group, token: int) -> None:
        ids = self.some(dice, group.leases[token].open)
        assert self.call("dead_letter(%s::text[])", [f"s{token}:{i}" for i in ids]) == len(ids)
        limit, group.max_attempts = group.max_attempts, 0
        group.failed(token, ids, NOW)
        group.max_attempts = limit

    def extend(self, dice: random.Random, group: Group, token: int) -> None:
        until = max(group.leases[token].until, self.now + dice.choice(LEASES))  # nobody shortens a lease
        self.call("extend(%s::text, make_interval(secs => %s))", f"s{token}", until - self.now)
        group.leases[token].until = until

    def stale_receipt(self, dice: random.Random) -> None:
        lost = sorted({r for g in self.groups.values() for r in g.lost})
        if not lost:
            return
        token, message = dice.choice(lost)
        verb = dice.choice(["ack", "nack", "dead_letter"])
        with refused("PB004"):
            self.call(f"{verb}(%s::text)", f"s{token}:{message}")

    @rule(seconds=st.sampled_from([1, 4, 30]))
    def wait(self, seconds: int) -> None:
        self.engine.bus.wait(seconds)

    @rule()
    def maintain(self) -> None:
        self.main.maintain(2)

    @rule(lanes=st.integers(1, 4))
    def alter_lanes(self, lanes: int) -> None:
        try:
            self.call("alter_stream(%s, %s)", self.stream, Jsonb({"lanes": lanes}))
        except psycopg.Error as e:
            if "still settling" not in str(e):
                raise

    @rule(name=st.sampled_from(GROUPS), position=POSITIONS, again=st.booleans())
    def place(self, name: str, position: str, again: bool) -> None:
        if again:
            self.recreate(name, position)
        else:
            self.seek(name, position)

    def seek(self, name: str, position: str) -> None:
        self.call("purge_dead_letters(%s, '0 s', %s)", self.stream, name)
        self.call("seek(%s, %s, %s)", self.stream, name, position)
        self.groups[name].place(self.log.committed if position == "latest" else self.from_earliest())

    def recreate(self, name: str, position: str) -> None:
        self.call("drop_group(%s, %s)", self.stream, name)
        lost: list[Receipt] = self.groups[name].lost
        for token, lease in self.groups[name].leases.items():
            lost += [(token, i) for i in lease.open]
        self.create(name, position)
        self.groups[name].lost = lost

    @rule(name=st.sampled_from(GROUPS))
    def redrive(self, name: str) -> None:
        group = self.groups[name]
        assert self.call("redrive(%s, null, %s)", self.stream, name) == group.dead.total()
        group.redriven()

    @staticmethod
    def some(dice: random.Random, ids: list[int]) -> list[int]:
        return sorted(dice.sample(ids, dice.randint(1, len(ids))))

    # What always holds.

    @invariant()
    def step(self) -> None:
        self.log.step += 1

    @invariant()
    def figures_agree(self) -> None:
        for name, group in self.groups.items():
            leases = {
                int(b[1:]): n
                for b, n in self.main.rows(
                    'select batch, messages from postbus.in_flight(%s) where "group" = %s', self.stream, name
                )
            }
            assert leases == {t: len(lease.open) for t, lease in group.leases.items()}
            dead = self.main.rows(
                "select event_id, attempt from postbus.dead_letters(%s, %s)", self.stream, name
            )
            assert sorted(dead) == sorted(group.dead.elements())

    def drain(self) -> None:
        """Let everything end, and see that every group got everything."""
        for who, tx in list(self.open.items()):
            self.engine.producers[who].commit()
            self.log.commit(tx)
            self.log.step += 1
        self.open.clear()
        empty = 0
        while empty < 3 or (any(g.owed() for g in self.groups.values()) and empty < 20):
            self.engine.bus.wait(60)
            self.main.maintain()
            tokens = {name: self.consume_once(name, 100, 20) for name in self.groups}
            for name, token in tokens.items():
                if token is not None:
                    self.main.ack(f"s{token}")
                    self.groups[name].finished(token, self.groups[name].leases[token].open)
            empty = 0 if any(tokens.values()) else empty + 1
        for name, group in self.groups.items():
            assert not group.owed(), f"{name} never got {sorted(group.owed())}"

    def teardown(self) -> None:
        try:
            if self.groups:
                self.drain()
                self.figures_agree()
        finally:
            for who in self.open:
                self.engine.producers[who].rollback()
            if self.groups:
                self.call("drop_stream(%s, true)", self.stream)
                self.main.maintain(3)


@pytest.mark.timeout(120 if DERANDOMIZE else 0)
def test_engine_does_what_the_model_says(bus: Bus) -> None:
    machine = type("BoundMachine", (Machine,), {"engine": Engine(bus)})
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
