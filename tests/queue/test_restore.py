"""A queue moves to another database by dump and restore, and goes on where it was."""

from __future__ import annotations

import pytest

from postbus.embedded import find_binaries
from tests.conftest import Database
from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told
from tests.stress.test_restore import copy

NAMES = ["plain", "archive", "keyed", "unlogged"]


def fill(s: Desk) -> dict[str, str]:
    """Every state a message can be in, in queues of every kind; the receipts of those that are out."""
    s.queue("plain")
    s.queue("archive", on_ack="archive")
    s.queue("keyed", max_size=50)
    s.policy(of="keyed", concurrency=1)
    s.queue("unlogged", unlogged_unsafe=True)
    out = {}
    for name in NAMES:
        for fate in ["acked", "dead", "out", "died", "back"]:
            s.send(fate, "k" if fate == "out" else None, to=name)
        work = {m.payload: m for m in [*s.receive(of=name, lease="1 hour"), *s.receive(of=name)]}
        s.ack(work["acked"].receipt)
        s.give_up(work["dead"].receipt)
        s.give_back(work["back"].receipt, delay=10, state={"n": 1})
        out[name] = work["out"].receipt
        s.send("behind", "k", to=name)
        s.send("urgent", to=name, priority=7, delay="1 minute")
        s.send("once", to=name, dedupe_key="d", delay="2 hours")
        s.rows("select postbus.bind(%s, 'topic.#')", name)
    s.rows("select postbus.pause('archive')")
    return out


def test_dump_and_restore(db: Database, emptydb: Database, pg_major: int) -> None:
    if find_binaries().major != pg_major:
        pytest.skip("the pg_dump at hand is of another version")
    before = Office(db)
    s = before.session()
    out = fill(s)
    ids = s.value("select max(id) from (table postbus.queued union all table postbus.queued_unlogged) x")
    listed = s.rows("select * from postbus.list_queues() order by name")
    policies = s.rows("select * from postbus.list_key_policies()")
    db.close()
    copy(db.dsn, emptydb.dsn)

    after = Office(emptydb)
    s = after.session()
    assert s.rows("select * from postbus.list_queues() order by name") == listed
    assert s.rows("select * from postbus.list_key_policies()") == policies
    assert s.receive(of="archive") == []
    s.rows("select postbus.resume('archive')")
    after.wait(30)
    for name in NAMES:
        # What was given back comes again with its state; a key's next message waits for the one that is out.
        waiting = [(m.payload, m.attempt, m.state) for m in [*s.receive(of=name), *s.receive(of=name)]]
        assert ("back", 2, {"n": 1}) in waiting
        assert (("behind", 1, None) in waiting) is (name != "keyed")
        # A receipt says where its message is, and that is elsewhere now: it comes again when its lease ends.
        with refused("PB004"):
            s.ack(out[name])
        # Ids go on; what was sent once is still sent once.
        assert s.send("new", to=name) > ids
        assert s.send("again", to=name, dedupe_key="d") <= ids
        assert s.letters(name) == [("dead", 1, "given up")]
    assert told(s.receive(of="keyed")) == ["new"]
    assert s.rows("select payload from postbus.archived('archive') order by id") == [("acked",)]
    assert len(s.rows("select * from postbus.send_topic('topic.x', 'x')")) == len(NAMES)
    after.wait(30)
    s.maintain(3)
    for name in NAMES:
        assert "urgent" in told(s.receive(of=name))  # the priority is known to be in use
    after.wait(3600)
    for name in NAMES:
        assert {"out", "died", "behind"} <= set(s.drain(of=name))
        assert s.value("select postbus.redrive(%s)", name) == 1
        assert s.drain(of=name) == ["dead"]
        after.db.close()
        s = after.session()
    s.queue("another")
    s.send("x", to="another")
    assert s.drain(of="another") == ["x"]
