"""The rate of a key with claims that overtake each other."""

from __future__ import annotations

from tests.conftest import Database
from tests.engine.bus import Bus


def test_a_claim_that_began_before_another_gets_nothing_more(db: Database) -> None:
    """It reads the clock, and is slow to come to the key; the other one has used up the burst meanwhile."""
    bus = Bus(db)
    s = bus.session()
    s.rows("select postbus.create_queue('q')")
    s.rows("select postbus.set_key_policy('q', 'k', rate => 10, burst => 2)")
    s.rows("select postbus.send_batch('q', a, keys => a) from array_fill('k'::text, array[10]) a")
    bus.wait(10)
    began = bus.now_text
    bus.wait(0.05)
    first = s.rows("select receipt from postbus.receive('q', 10)")
    assert len(first) == 2
    s.ack(*[r[0] for r in first])  # its key is looked at again
    s.value("select set_config('postbus.fake_now', %s, false)", began)
    assert s.rows("select id from postbus.receive('q', 10)") == []
    s.sync()
    assert s.rows("select id from postbus.receive('q', 10)") == []
