"""No pair of functions that change something deadlocks, in either order; only who is listed here waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Database, _fresh
from tests.engine.bus import refused
from tests.queue_stress.matrix import (
    DEADLOCK,
    EXPECTED,
    SETTLE,
    VERBS,
    Connection,
    Duel,
    Side,
    call,
    prepare,
    reset,
)
from tests.stress.sessions import wait_until_blocked

CLAIM = ("receive", "pop")
CONFIGURE = (
    *("set_key_policy", "set_default_policy", "unset_key_policy", "alter_queue"),
    *("pause", "bind", "bind_stream"),
)

# Who may wait for whom: (has done it, in a transaction that is open) -> (waits for the end of it).
LEGITIMATE = {
    "the row of the queue": (CONFIGURE, CONFIGURE),
    "the row of a message that was taken": (CLAIM, SETTLE),
    "the row of a message that was deleted": (("purge_queue",), SETTLE),
    "the row of a schedule that is being fired": (("maintain",), ("schedule",)),
}


def legitimate(holder: tuple[str, ...], waiter: str) -> bool:
    return any(waiter in waiters and set(holder) & set(holders) for holders, waiters in LEGITIMATE.values())


@dataclass
class Arena:
    """The objects and two sessions that live through all pairs."""

    main: Connection
    watch: Connection
    x: Side
    y: Side
    keyed: bool

    def problems(self, a: str, b: str) -> list[str]:
        reset(self.main, self.keyed, self.x, self.y)
        outcome = Duel(self.main, self.x, self.y).run(a, b)
        pair = f"{a}, {b} against {b}, {a}"
        found = [f"{pair}: {w} waited for {h}" for h, w in sorted(outcome.waits) if not legitimate(h, w)]
        found += [f"{pair}: {who}: {e}" for who, e in outcome.errors.items() if e not in EXPECTED]
        return found


def connect(db: Database) -> Connection:
    c = db.connect()
    c.execute("set deadlock_timeout = '20 ms'")
    c.execute("set statement_timeout = '10 s'")
    return c


def arena(db: Database, keyed: bool) -> Arena:
    main = connect(db)
    prepare(main, keyed)
    return Arena(main, connect(db), Side("x", connect(db)), Side("y", connect(db)), keyed)


@pytest.fixture(scope="module")
def keyed(server_dsn: str, template: str) -> Iterator[Arena]:
    for db in _fresh(server_dsn, template):
        yield arena(db, keyed=True)


@pytest.fixture(scope="module")
def plain(server_dsn: str, template: str) -> Iterator[Arena]:
    for db in _fresh(server_dsn, template):
        yield arena(db, keyed=False)


@pytest.mark.parametrize("first", VERBS)
def test_queues_with_key_policies(keyed: Arena, first: str) -> None:
    problems = [p for second in VERBS for p in keyed.problems(first, second)]
    assert not problems, "\n".join(problems)


# What configures a queue is the same for both kinds.
PLAIN = (*SETTLE, *CLAIM, "cancel", "purge_queue", "redrive", "maintain", "send", "alter_queue")


@pytest.mark.parametrize("first", PLAIN)
def test_plain_queues(plain: Arena, first: str) -> None:
    problems = [p for second in PLAIN for p in plain.problems(first, second)]
    assert not problems, "\n".join(problems)


# The waits that are meant to be, one by one: the second session waits, and goes on when the first one ends.

SAME_DEDUPE_KEY = call("send('q', 'm', dedupe_key => 'd')")
SAME_SCHEDULE = call("schedule('schedule-x', '* * * * *', 'q')")


@pytest.mark.parametrize(
    ("first", "second"),
    [("ack", "nack"), ("nack", "extend"), ("extend", "ack"), ("dead_letter", "release"), ("release", "ack")],
)
def test_one_receipt_in_two_hands(plain: Arena, first: str, second: str) -> None:
    """The other waits, and learns that the lease is lost, or still good."""
    reset(plain.main, False, plain.x, plain.y)
    receipts = plain.x.receipts["ack"]
    for side in (plain.x, plain.y):
        side.receipts = dict.fromkeys(SETTLE, receipts)
    outcome = Duel(plain.main, plain.x, plain.y).run(first, second)
    assert ((first,), second) in outcome.waits
    assert DEADLOCK not in outcome.errors.values()
    assert set(outcome.errors.values()) <= {"PB004"}


@pytest.mark.parametrize("name", ["dedupe", "schedule"])
def test_the_same_name_in_two_hands(plain: Arena, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two senders with one dedupe key, two callers with one schedule: the second waits for the first."""
    reset(plain.main, False, plain.x, plain.y)
    monkeypatch.setitem(VERBS, name, SAME_DEDUPE_KEY if name == "dedupe" else SAME_SCHEDULE)
    outcome = Duel(plain.main, plain.x, plain.y).run(name, name)
    assert ((name,), name) in outcome.waits
    assert not outcome.errors


def test_a_claim_of_keys_and_late_acks(keyed: Arena) -> None:
    """X takes m1, Y acks m2, X comes to m2, Y to m1: claims do not wait, so it ends."""
    c, x, y = keyed.main, keyed.x, keyed.y
    reset(c, True, x, y)
    c.execute("select postbus.purge_queue('q')")
    ids = c.execute("select postbus.send_batch('q', array['1', '2'], keys => array['a', 'b'])").fetchone()
    assert ids is not None
    rows = c.execute("select receipt from postbus.receive('q', 100, '1 us')").fetchall()
    late = [r[0] for r in rows]
    assert len(late) == 2
    for s in (x, y):
        s.conn.execute("begin")
    got = x.conn.execute("select receipt from postbus.receive('q', 1)").fetchall()
    assert len(got) == 1
    taken = got[0][0].split(":")[0]
    mine = next(r for r in late if r.split(":")[0] == taken)
    other = next(r for r in late if r != mine)
    y.conn.execute("select postbus.ack(%s::text)", [other])
    x.conn.execute("set local lock_timeout = '1 s'")
    try:
        # Y will wait for the message that X has taken again; X must not wait for Y's.
        assert x.conn.execute("select receipt from postbus.receive('q', 1)").fetchall() == []
        x.conn.execute("commit")
        y.conn.execute("commit")
    finally:
        x.conn.execute("rollback")
        y.conn.execute("rollback")
    assert c.execute("select count(*) from postbus.peek('q')").fetchone() == (1,)


def test_cancelling_waits_for_nobody(plain: Arena) -> None:
    """Two messages whose leases are over; somebody holds the first. What cannot be had at once is left alone.

    The first was moved by a heartbeat, so that acks come to it last: a cancel that waited would deadlock.
    """
    c, x, y = plain.main, plain.x, plain.y
    reset(c, False, x, y)
    c.execute("select postbus.purge_queue('q')")
    c.execute("select postbus.send_batch('q', array['1', '2'])")
    rows = c.execute("select id, receipt from postbus.receive('q', 2, '1 us')").fetchall()
    ids, receipts = [r[0] for r in rows], [r[1] for r in rows]
    c.execute("select postbus.extend(%s::text, '1 us')", [receipts[0]])
    c.execute("begin")
    c.execute("select from postbus.queued where id = %s for update", [ids[0]])
    x.conn.execute("begin")
    assert x.conn.execute("select postbus.cancel('q', %s::bigint[])", [ids]).fetchone() == (ids[1:],)
    with ThreadPoolExecutor(1) as pool:
        ack = pool.submit(y.conn.execute, "select postbus.ack(%s::text[])", [receipts])
        wait_until_blocked(plain.watch, y.conn)
        c.execute("commit")
        x.conn.execute("commit")
        with refused("PB004"):
            ack.result()


@pytest.mark.parametrize("create", ["create_queue('d', %s)", "create_stream('d', %s)"])
def test_upkeep_waits_for_no_producer(db: Database, create: str) -> None:
    """A dedupe key whose window is over is used again while upkeep clears such keys away."""
    x, y = db.connect(), connect(db)
    x.execute(f"select postbus.{create}".encode(), [Jsonb({"dedupe_window": 1})])
    verb = "send" if "queue" in create else "publish"
    send = f"select postbus.{verb}('d', 'm', dedupe_key => 'k')".encode()
    x.execute("select set_config('postbus.fake_now', (now() - interval '1 hour')::text, false)")
    x.execute(send)
    x.execute("select set_config('postbus.fake_now', '', false)")
    x.execute("begin")
    x.execute(send)
    y.execute("set lock_timeout = '1 s'")
    assert [r[3] for r in y.execute("select * from postbus.maintain()").fetchall() if r[3]] == []
    x.execute("commit")
