"""Broken engines: each breaks one rule of the queue engine, so that the tests can show they would notice."""

from __future__ import annotations

import re

from tests.queue_stress.ledger import Connection
from tests.stress.broken import rewrite
from tests.stress.sessions import value

KEYS = "postbus._receive_keys(postbus.queue, int, timestamptz, text, text, timestamptz)"
PICK = "postbus._pick(postbus.queue, text[], int, smallint[], text, timestamptz)"
RANGE = """postbus._claim_range(
  postbus.queue, int, timestamptz, timestamptz, int, timestamptz, text, text, timestamptz)"""
FOLD_WAKES = "postbus._fold_wakes(int, bigint, int, int, timestamptz)"
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


def wakes_of_locked_keys_deleted(c: Connection) -> None:
    """Wakes that nobody has locked are folded without a look at who has the row of their key."""
    text = str(value(c, "select pg_get_functiondef(%s::regprocedure)", FOLD_WAKES))
    text, n = re.subn(
        r"limit p_window\) x\s+where x\.key = any \(v_mine\)",
        "limit p_window for update skip locked) x",
        text,
    )
    assert n == 1
    c.execute(text.encode())


def attempts_not_capped(c: Connection) -> None:
    """A message is handed out as often as its workers die."""
    for function, caps in ((RECEIVE, 1), (RANGE, 1), (PICK, 3)):
        text = str(value(c, "select pg_get_functiondef(%s::regprocedure)", function))
        text, n = re.subn(r"\w\.attempt < (v_most|p_q\.max_attempts) and", "", text)
        assert n == caps, f"{function} has {n} caps"
        c.execute(text.encode())


LEVELS = re.compile(r"\n *v_bits := pg_sequence_last_value.*?;\n *v_levels := .*?;(?=\n)")
FOLD = "    v_folded := postbus._fold_wakes(p_q.id, v_first_wake, v_width"
WAIT = f"    perform pg_advisory_xact_lock({GATE});\n"


def gate_before_the_wakes(c: Connection) -> None:
    """Not broken, only slow: waits for a test before it folds the wakes."""
    rewrite(c, KEYS, (FOLD, WAIT + FOLD))


def levels_before_the_wakes(c: Connection) -> None:
    """The priorities in use are read first, then the wakes are folded."""
    text = str(value(c, "select pg_get_functiondef(%s::regprocedure)", KEYS))
    found = LEVELS.findall(text)
    assert len(found) == 1
    assert text.count(FOLD) == 1
    text = text.replace(found[0], "").replace(FOLD, found[0].lstrip("\n") + "\n" + WAIT + FOLD)
    c.execute(text.encode())
