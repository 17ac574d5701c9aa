"""Broken engines: each breaks one rule of the queue engine, so that the tests can show they would notice."""

from __future__ import annotations

import re

from tests.queue_stress.ledger import Connection
from tests.stress.broken import rewrite
from tests.stress.sessions import value

KEYS = "postbus._receive_keyed(int, regclass, int, timestamptz, text, text, timestamptz)"
PICK = "postbus._pick(postbus.queue, text[], int, smallint[], text, timestamptz)"
RANGE = """postbus._claim_range(
  postbus.queue, int, timestamptz, timestamptz, int, timestamptz, text, text, timestamptz)"""
RECEIVE = "postbus.receive(text, int, interval, text, text)"
GATE = 4711


def claim_kept_on_nack(c: Connection) -> None:
    """A nack gives the message back, and leaves its receipt good."""
    for name in ("_nack_work", "_nack_work_unlogged"):
        rewrite(
            c,
            f"postbus.{name}(text[], interval, text, jsonb, boolean)",
            ("set claim = m.claim + 1, worker = null", "set worker = null"),
        )


def claim_not_compared(c: Connection) -> None:
    """A receipt is good as long as its message is there, whoever has it by now."""
    text = str(value(c, "select pg_get_functiondef('postbus._locked(text[])'::regprocedure)"))
    assert text.count("q.claim = r.claim") == 2
    text = (
        text.replace("q.claim = r.claim", "true")
        .replace("q.ctid = r.tid", "q.id = r.id")
        .replace("and q.tracked", "")
    )
    c.execute(text.encode())


def running_not_counted(c: Connection) -> None:
    """A key has all of its places whenever it is served."""
    rewrite(c, PICK, ("l.places - h.running", "l.places"))
    rewrite(c, KEYS, ("h.keyed and h.held limit 1", "h.keyed and false limit 1"))


def wakes_of_locked_keys_deleted(c: Connection) -> None:
    """Wakes are folded without a look at who has the row of their key."""
    clear = "    if v_keys is not null then"
    all_of_them = """    delete from postbus.key_wake x where x.ctid = any (array(
      select w.ctid from postbus.key_wake w where w.queue_id = p_queue for update skip locked));\n"""
    rewrite(c, KEYS, (clear, all_of_them + clear))


def attempts_not_capped(c: Connection) -> None:
    """A message is handed out as often as its workers die."""
    for function, caps in ((RECEIVE, 1), (RANGE, 1), (KEYS, 1), (PICK, 3)):
        text = str(value(c, "select pg_get_functiondef(%s::regprocedure)", function))
        text, n = re.subn(r"\w\.attempt < (v_most|p_q\.max_attempts) and", "", text)
        assert n == caps, f"{function} has {n} caps"
        c.execute(text.encode())


LEVELS = "    v_bits := pg_sequence_last_value(p_register) & 4095;\n"
TURN = "    if v_look then\n      v_new := array("
WAIT = f"    perform pg_advisory_xact_lock({GATE});\n"


def gate_before_the_wakes(c: Connection) -> None:
    """Not broken, only slow: waits for a test before it folds the wakes."""
    rewrite(c, KEYS, (TURN, WAIT + TURN))


def levels_before_the_wakes(c: Connection) -> None:
    """The priorities in use are read first, then the wakes are folded."""
    rewrite(c, KEYS, (LEVELS, ""), (TURN, LEVELS + WAIT + TURN))


LOOK = "select x.ctid as tid from postbus.queued x\n    where "
TOUCHED = "x.xmax = 0 or v_any or"


def gate_in_the_claim(c: Connection) -> None:
    """Not broken, only slow: sessions that say so wait for a test when their claim has begun to look."""
    asked = "current_setting('test.gate', true) is distinct from 'on'"
    gate = f"({asked} or (select pg_advisory_xact_lock({GATE}) is not null)) and "
    rewrite(c, RECEIVE, (LOOK, LOOK + gate), (TOUCHED, "x.xmax = 0 or"))


def claims_lock_what_others_took(c: Connection) -> None:
    """A claim does not look who has touched a message, only whether it can lock it."""
    gate_in_the_claim(c)
    rewrite(c, RECEIVE, ("x.xmax = 0 or", "true or"))
