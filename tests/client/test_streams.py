"""Groups: order, pages that are acked whole or in parts, and moving about."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postbus import BadArgument, Bus, Group, LeaseLost
from postbus.client import _pace
from tests.client.conftest import count, eventually, fail, in_flight, raises
from tests.conftest import Database


def make(bus: Bus, ordering: str, lanes: int = 1) -> Group[Any]:
    stream = bus.stream("orders", create=True, lanes=lanes)
    return stream.group("billing", ordering=ordering, backoff=0, start="earliest")


def publish(group: Group[Any], keys: str) -> None:
    """One event for each letter, which is its key."""
    group.stream.publish_batch(list(range(1, len(keys) + 1)), key=[k if k != "-" else None for k in keys])


@pytest.mark.parametrize("ordering", ["stream", "key", "none"])
def test_every_group_gets_everything_once(bus: Bus, ordering: str) -> None:
    one = make(bus, ordering, lanes=3)
    two = one.stream.group("audit", start="earliest")
    publish(one, "abcab-" * 50)
    for group in (one, two):
        assert sorted(m.payload for m in group.messages(wait=0, max=7)) == list(range(1, 301))
        assert len(group.consume()) == 0


@pytest.mark.parametrize("ordering", ["stream", "key", "none"])
def test_several_consumers(bus: Bus, another: Callable[..., Bus], ordering: str) -> None:
    group = make(bus, ordering, lanes=4)
    keys = [chr(97 + n % 11) for n in range(600)]
    publish(group, "".join(keys))
    seen: list[tuple[str, int]] = []
    lock = threading.Lock()

    def consume(mine: Group[Any]) -> None:
        for m in mine.messages(wait=1, max=20):
            with lock:
                seen.append((str(m.key), m.payload))

    groups = [another().stream("orders").group("billing") for _ in range(3)]
    threads = [threading.Thread(target=consume, args=(g,)) for g in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n for _, n in seen) == list(range(1, 601))
    by_key: dict[str, list[int]] = defaultdict(list)
    for key, n in seen:
        by_key[key].append(n)
    if ordering != "none":
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
    if ordering == "stream":
        assert [n for _, n in seen] == list(range(1, 601))


@pytest.mark.parametrize(
    ("ordering", "expected"),
    [
        ("key", [1, 2, 4, 2, 3, 5, 6]),  # 3, 5 and 6 are not of that key
        ("stream", [1, 2, 2, 3, 4, 5, 6]),
        ("none", [1, 2, 3, 4, 5, 6, 2]),
    ],
)
@pytest.mark.parametrize("way", ["verb", "release", "conn", "batch"])
def test_a_message_that_goes_back_takes_those_behind_it_along(
    bus: Bus, db: Database, ordering: str, expected: list[int], way: str
) -> None:
    """Nothing of a key is begun while an earlier message of it waits for another try."""
    group = make(bus, ordering)
    publish(group, "abcaba"[:6].replace("c", "-"))
    seen: list[tuple[int, str | None]] = []
    failed = False

    def work(m: Any) -> None:
        nonlocal failed
        seen.append((m.payload, m.key))
        if m.payload == 2 and not failed:
            failed = True
            if way == "release":
                m.release()
            else:
                m.nack(reason="not yet")

    if way == "batch":
        while len(batch := group.consume()):
            for m in batch:
                work(m)
    else:
        for m in group.messages(wait=0):
            work(m)
    order = {key: [n for n, k in seen if k == key] for key in ("a", "b")}
    if ordering == "none":
        assert sorted(n for n, _ in seen) == [1, 2, 2, 3, 4, 5, 6]
    elif ordering == "key":
        assert order == {"a": [1, 4, 6], "b": [2, 2, 5]}
        assert sorted(n for n, _ in seen) == [1, 2, 2, 3, 4, 5, 6]
    else:
        assert [n for n, _ in seen] == expected
    assert in_flight(db, "orders") == 0
    assert group.dead_letters() == []
    assert len(group.consume()) == 0


@pytest.mark.parametrize("ordering", ["stream", "key"])
def test_exception_in_a_with_block_keeps_the_order(bus: Bus, ordering: str) -> None:
    group = make(bus, ordering)
    publish(group, "aabba")
    seen = []
    failures = 0
    while True:
        try:
            with group.messages(wait=0) as messages:
                for m in messages:
                    seen.append((m.payload, m.attempt))
                    if m.payload in (1, 4) and m.attempt < 3:
                        failures += 1
                        fail()
        except ZeroDivisionError:
            continue
        break
    assert failures == 4
    # Those behind did not use up attempts.
    done = dict(seen)
    assert done == {1: 3, 2: 1, 3: 1, 4: 3, 5: 1}
    for key in ([1, 2, 5], [3, 4]):
        last = [n for n, attempt in seen if n in key and attempt == done[n]]
        assert last == key
    if ordering == "stream":
        assert [n for n, attempt in seen if attempt == done[n]] == [1, 2, 3, 4, 5]


def test_last_failure_of_a_key_lets_the_others_pass(bus: Bus) -> None:
    """The message becomes a dead letter; what was behind it is neither lost nor acked with it."""
    stream = bus.stream("orders", create=True)
    group = stream.group("billing", ordering="key", max_attempts=1)
    stream.publish_batch([1, 2, 3, 4], key=["a", "a", "b", "a"])
    seen = []
    for m in group.messages(wait=0):
        seen.append(m.payload)
        if m.payload == 1:
            m.nack(reason="never")
    assert sorted(seen) == [1, 2, 3, 4]
    assert [n for n in seen if n != 3] == [1, 2, 4]
    assert [d.payload for d in group.dead_letters()] == [1]


def test_whole_pages_are_acked_by_one_token(bus: Bus, db: Database) -> None:
    group = make(bus, "stream")
    group.stream.publish_batch(list(range(300)))
    before = count(db, "select last_value from postbus.lease_token")
    for _ in group.messages(wait=0, max=100):
        pass
    assert count(db, "select last_value from postbus.lease_token") - before <= 5
    assert in_flight(db, "orders") == 0
    assert count(db, "select count(*) from postbus.redelivery") == 0


def test_parts_of_a_page_are_acked_after_a_while(bus: Bus, db: Database) -> None:
    group = make(bus, "stream")
    group.stream.publish_batch(list(range(10)))
    for m in group.messages(wait=0):
        if m.payload == 4:
            # The body of the fifth takes its time: the four before it are told meanwhile.
            eventually(lambda: in_flight(db, "orders") == 6)
    assert in_flight(db, "orders") == 0


def test_break_in_a_page(bus: Bus) -> None:
    group = make(bus, "key")
    publish(group, "abab")
    for m in group.messages():
        if m.payload == 2:
            break
    found = sorted((m.payload, m.attempt) for m in group.messages(wait=1))
    assert found == [(2, 2), (3, 1), (4, 1)]


def test_dead_letter_in_a_page(bus: Bus) -> None:
    group = make(bus, "stream")
    publish(group, "aaaa")
    seen = []
    for m in group.messages(wait=0):
        seen.append(m.payload)
        if m.payload == 2:
            m.dead_letter("no good")
    assert seen == [1, 2, 3, 4]
    assert [d.payload for d in group.dead_letters()] == [2]


def test_batches_of_a_stream(bus: Bus) -> None:
    group = make(bus, "stream")
    group.stream.publish_batch(list(range(50)))
    seen: list[int] = []
    for batch in group.batches(max=20, wait=0):
        assert len(batch) <= 20
        seen += [m.payload for m in batch]
    assert seen == list(range(50))


def test_nack_in_a_batch(bus: Bus) -> None:
    """The whole batch is in hand: what came behind the failed one comes again, whatever was done with it."""
    group = make(bus, "key")
    publish(group, "abab")
    first = True
    rounds = []
    for batch in group.batches(wait=0):
        rounds.append([m.payload for m in batch])
        if first:
            first = False
            batch[0].nack()
    assert rounds[0] == [1, 2, 3, 4]
    assert [n for later in rounds[1:] for n in later] == [1, 3]


def test_several_go_back_at_once(bus: Bus) -> None:
    group = make(bus, "key")
    publish(group, "abaab")
    batch = group.consume()
    assert bus.nack([batch[0], batch[2]]) == 2  # the two first of a, and 4 behind them
    bus.ack([batch[1], batch[4]])
    assert [m.payload for m in batch] == []
    assert [(m.payload, m.attempt) for m in group.messages(wait=0)] == [(1, 2), (3, 2), (4, 1)]


def test_seek(bus: Bus) -> None:
    group = make(bus, "stream")
    publish(group, "abc")
    between = datetime.now(UTC)
    group.stream.publish_batch([4, 5])

    def rest() -> list[int]:
        return [m.payload for m in group.messages(wait=0)]

    assert rest() == [1, 2, 3, 4, 5]
    group.seek("earliest")
    assert rest() == [1, 2, 3, 4, 5]
    group.seek(3)
    assert rest() == [3, 4, 5]
    group.seek("id:5")
    assert rest() == [5]
    group.seek(between)
    assert rest() == [4, 5]
    group.seek(between - timedelta(hours=1))
    group.seek("latest")
    assert rest() == []
    with pytest.raises(BadArgument):
        group.seek("nowhere")
    with pytest.raises(BadArgument, match="time zone"):
        group.seek(datetime(2026, 1, 1))


def test_seek_ends_open_leases(bus: Bus) -> None:
    group = make(bus, "stream")
    publish(group, "ab")
    taken = group.consume().messages
    group.seek("earliest")
    with pytest.raises(LeaseLost):
        taken[0].ack()
    assert len(group.consume()) == 2


def test_wait_for_an_event(bus: Bus, another: Callable[..., Bus]) -> None:
    group = make(bus, "key")
    other = another().stream("orders")
    timer = threading.Timer(0.3, lambda: other.publish("news"))
    timer.start()
    assert [m.payload for m in group.consume(wait=20)] == ["news"]
    timer.join()


def test_group_that_starts_late_sees_what_comes(bus: Bus) -> None:
    stream = bus.stream("orders", create=True)
    stream.publish("before")
    group = stream.group("late")
    stream.publish("after")
    assert [m.payload for m in group.messages(wait=0)] == ["after"]


def test_ack_of_a_whole_batch(bus: Bus) -> None:
    group = make(bus, "key")
    publish(group, "ab")
    batch = group.consume()
    token = batch[0].batch
    assert token is not None
    assert bus.ack(token) == 2
    with raises(LeaseLost):
        batch[0].ack()


@pytest.mark.parametrize("source", ["queue", "stream"])
def test_what_was_given_back_is_looked_for(bus: Bus, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its consumer does not wait for the next poll, nor for a notification that does not come."""
    monkeypatch.setattr(_pace, "IDLE", 60.0)
    mine: Any
    if source == "queue":
        mine = bus.queue("emails", create=True, backoff=0.05)
        mine.send(1)
    else:
        mine = make(bus, "stream")
        mine.stream.publish(1)
    attempts = []
    with mine.messages() as messages:
        for m in messages:
            attempts.append(m.attempt)
            if m.attempt == 4:
                break
            m.nack(delay=0.1 if m.attempt == 2 else None)
    assert attempts == [1, 2, 3, 4]
