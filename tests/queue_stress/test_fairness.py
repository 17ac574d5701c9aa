"""Turns: how many messages of others go out before a small key is served, counted one by one."""

from __future__ import annotations

import itertools

import pytest

from tests.conftest import Database
from tests.engine.bus import Bus, Session

SMALL, LARGE = 10, 1000


@pytest.fixture
def s(db: Database) -> Session:
    s = Bus(db).session()
    s.rows("select postbus.create_queue('q')")
    return s


def fill(s: Session, key: str, n: int) -> None:
    s.rows(
        "select postbus.send_batch('q', a, keys => a) from array_fill(%s::text, array[%s]) a",
        *(key, n),
    )


def serve(s: Session, size: int, of: str) -> list[str]:
    """Keys in the order in which their messages went out, until a key has had all of its messages."""
    out: list[str] = []
    left = s.value("select count(*) from postbus.queued where key = %s", of)
    while left > 0:
        s.bus.wait(0.001)
        rows = s.rows("select key, receipt from postbus.receive('q', %s)", size)
        assert rows
        s.rows("select postbus.ack(%s::text[])", [r[1] for r in rows])
        out += [r[0] for r in rows]
        left -= sum(r[0] == of for r in rows)
    return out


@pytest.mark.parametrize("size", [1, 4, 10, 50])
@pytest.mark.parametrize("concurrency", [None, 1, 5])
def test_a_large_key_does_not_delay_a_small_one(s: Session, size: int, concurrency: int | None) -> None:
    """A hundred times the backlog, sent before: a few of its messages go out between those of the small."""
    s.rows("select postbus.set_key_policy('q', concurrency => %s)", concurrency)
    fill(s, "large", LARGE)
    s.bus.wait(1)
    fill(s, "small", SMALL)
    out = serve(s, size, "small")
    before = out.index("small")
    # A call that asks for more than there are keys gives each its share of it.
    share = max(1, size // 2)
    assert before <= 2 * share
    assert out.count("large") <= SMALL + 2 * size


def test_a_small_key_that_comes_late_is_next(s: Session) -> None:
    """Ten large keys are at work; a new key does not wait for more than one round of them."""
    s.rows("select postbus.set_key_policy('q')")
    for i in range(10):
        fill(s, f"large {i}", 100)
    for _ in range(25):
        s.bus.wait(0.001)
        s.rows("select postbus.ack(array(select receipt from postbus.receive('q')))")
    s.bus.wait(0.001)
    fill(s, "small", 3)
    out = serve(s, 1, "small")
    turns = [i for i, key in enumerate(out) if key == "small"]
    assert turns[0] <= 11
    assert max(b - a for a, b in itertools.pairwise(turns)) <= 11


def test_without_turns_it_would_be_seen(s: Session) -> None:
    """The same on a queue without key policies, which promises no turns: the counter does count."""
    fill(s, "large", LARGE)
    s.bus.wait(1)
    fill(s, "small", SMALL)
    assert serve(s, 50, "small").index("small") == LARGE
