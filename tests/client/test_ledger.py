"""The bookkeeping of a consumer by itself."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest

from postbus.client._ledger import ENOUGH, Ledger
from postbus.client._outcome import ACK, RELEASE, dead_letter, nack

LATE = float("inf")


@dataclass(frozen=True)
class Thing:
    receipt: str


def ledger_of(
    *receipts: str, token: str | None = None, ordering: str = "none", keys: str = ""
) -> Ledger[Thing]:
    ledger: Ledger[Thing] = Ledger(lambda: None)
    ledger.ordering = ordering
    add(ledger, *receipts, token=token, keys=keys)
    return ledger


def add(
    ledger: Ledger[Thing], *receipts: str, token: str | None = None, keys: str = "", at: float = 0
) -> None:
    named = keys or "k" * len(receipts)
    rows = [(r, None if k == "-" else k, token) for r, k in zip(receipts, named, strict=True)]
    ledger.add(rows, [Thing(r) for r in receipts], [], at)


def popped(ledger: Ledger[Thing]) -> list[str]:
    found = []
    while (thing := ledger.pop(0)) is not None:
        found.append(thing.receipt)
    return found


def test_once_through() -> None:
    ledger = ledger_of("a", "b")
    assert popped(ledger) == ["a", "b"]
    assert ledger.settle("a", ACK)
    assert not ledger.settle("a", ACK)
    assert not ledger.settle("nobody's", ACK)
    assert (ledger.pending, ledger.on_lease, ledger.ready) == (1, 2, 0)
    assert ledger.acks(LATE) == (["a"], {})
    ledger.told(["a"])
    ledger.told(["a"])
    assert (ledger.pending, ledger.on_lease) == (0, 1)
    assert ledger.holds("b")
    assert not ledger.holds("a")


def test_whole_page_by_its_token() -> None:
    ledger = ledger_of("a", "b", token="t")
    ledger.settle("a", ACK)
    assert ledger.acks(0) == ([], {})
    assert ledger.acks(LATE) == (["a"], {})
    assert ledger.partly_acked()
    assert not ledger.urgent
    ledger.settle("b", ACK)
    assert ledger.urgent
    [(token, receipts)] = ledger.acks(0)[1].items()
    assert (token, sorted(receipts)) == ("t", ["a", "b"])


@pytest.mark.parametrize("by", ["verb", "nack"])
def test_page_that_is_no_longer_whole(by: str) -> None:
    ledger = ledger_of("a", "b", token="t")
    if by == "verb":
        ledger.forget("a")  # in a transaction that may roll back
    else:
        ledger.settle("a", nack())
    ledger.settle("b", ACK)
    assert ledger.acks(0) == (["b"], {})


def test_page_after_a_nack_that_was_told() -> None:
    ledger = ledger_of("a", "b", token="t")
    ledger.settle("a", nack())
    ledger.told(["a"])
    ledger.settle("b", ACK)
    assert ledger.acks(0) == ([], {"t": ["b"]})


def test_enough_is_urgent() -> None:
    ledger = ledger_of(*map(str, range(ENOUGH)))
    for n in range(ENOUGH):
        assert not ledger.urgent
        ledger.settle(str(n), ACK)
    assert ledger.urgent
    ledger.failures()
    assert not ledger.urgent


@pytest.mark.parametrize(("ordering", "behind"), [("key", ["c"]), ("stream", ["b", "c", "d"]), ("none", [])])
def test_what_goes_back_with_another(ordering: str, behind: list[str]) -> None:
    for outcome in (nack(reason="x"), RELEASE):
        ledger = ledger_of("a", "b", "c", "d", token="t", ordering=ordering, keys="kok-")
        assert ledger.settle("a", outcome)
        found = ledger.failures()
        assert sorted(found.pop(RELEASE, [])) == sorted(behind + (["a"] if outcome is RELEASE else []))
        assert found == ({} if outcome is RELEASE else {outcome: ["a"]})
        assert popped(ledger) == [r for r in "bcd" if r not in behind]
    ledger = ledger_of("a", "b", "c", "d", token="t", ordering=ordering, keys="kok-")
    assert ledger.ending("a", goes_back=True) == behind
    assert ledger.ending("a", goes_back=False) == []


def test_releases_are_told_before_nacks() -> None:
    ledger = ledger_of("a", "b", token="t", ordering="stream")
    ledger.settle("a", nack(reason="x"))
    assert list(ledger.failures()) == [RELEASE, nack(reason="x")]


def test_without_a_key_there_is_no_order() -> None:
    ledger = ledger_of("a", "b", token="t", ordering="key", keys="--")
    ledger.settle("a", nack())
    assert RELEASE not in ledger.failures()


def test_dead_letters_let_others_pass() -> None:
    ledger = ledger_of("a", "b", token="t", ordering="stream")
    ledger.settle("a", dead_letter("x"))
    assert popped(ledger) == ["a", "b"][1:]


def test_old_leases() -> None:
    ledger = ledger_of("a", token="t")
    add(ledger, "q1", "q2", at=5)
    assert ledger.old(0)[0] == []
    tokens, pages = ledger.old(5)
    assert tokens == ["t"]
    for page in pages:
        page.kept_at = 10
    assert sorted(ledger.old(6)[0]) == ["q1", "q2"]
    ledger.ending("q1", goes_back=False)
    assert ledger.old(6)[0] == ["q2"]
    ledger.not_ending("q1")
    assert sorted(ledger.old(6)[0]) == ["q1", "q2"]


def test_one_whose_lease_may_have_ended_is_not_begun() -> None:
    ledger = ledger_of("a")
    assert ledger.pop(oldest=1) is None
    assert ledger.ready == 1
    ledger.old(1)[1][0].kept_at = 2
    assert ledger.pop(oldest=1) == Thing("a")


def test_lost_leases() -> None:
    ledger = ledger_of("a", "b", "c", token="t")
    add(ledger, "q")
    assert ledger.pop(0) == Thing("a")
    assert ledger.pop(0) == Thing("b")
    ledger.settle("b", ACK)
    assert ledger.lose("t") == (3, {"a"})  # b is done, c was not begun
    assert ledger.lose("t") == (0, set())
    assert popped(ledger) == ["q"]
    assert ledger.pending == 0


def test_what_is_being_finished_is_not_lost() -> None:
    ledger = ledger_of("a")
    ledger.ending("a", goes_back=False)
    assert ledger.lose("a") == (0, set())


def test_give_back() -> None:
    ledger = ledger_of("a", "b", "c")
    ledger.pop(0)
    ledger.give_back()
    assert ledger.failures() == {RELEASE: ["b", "c"]}
    assert popped(ledger) == []


def test_refused_ones_are_settled_at_once() -> None:
    ledger: Ledger[Thing] = Ledger(lambda: None)
    bad = dead_letter("unreadable")
    ledger.add([("a", None, None), ("b", None, None)], [Thing("b")], [("a", bad)], 0)
    assert ledger.failures() == {bad: ["a"]}
    assert popped(ledger) == ["b"]


def test_the_same_receipt_again_after_a_crash_of_the_server() -> None:
    ledger = ledger_of("a", "b", token="t")
    assert ledger.pop(0) == Thing("a")
    ledger.settle("a", ACK)
    add(ledger, "a", "b", "c", token="t")
    assert (ledger.pending, ledger.on_lease) == (0, 3)
    ledger.told(["a", "b", "c"])
    assert (ledger.pending, ledger.on_lease, ledger.old(LATE)[0]) == (0, 0, [])


def test_room_is_announced() -> None:
    rooms = []
    ledger: Ledger[Thing] = Ledger(lambda: rooms.append(1))
    add(ledger, "a", "b")
    ledger.told(["a"])
    ledger.forget("b")
    assert len(rooms) == 2


def test_from_many_threads() -> None:
    """Nothing is handed out twice or lost, and the count of what is pending comes out even."""
    ledger: Ledger[Thing] = Ledger(lambda: None)
    ledger.ordering = "key"
    total = 4000
    taken: list[str] = []
    stop = threading.Event()

    def feed() -> None:
        for n in range(0, total, 40):
            add(ledger, *map(str, range(n, n + 40)), token=f"t{n}", keys="ab" * 20)

    def work() -> None:
        while not stop.is_set():
            thing = ledger.pop(0)
            if thing is not None:
                taken.append(thing.receipt)
                ledger.settle(thing.receipt, random.choice([ACK, ACK, nack(), dead_letter()]))

    def tell() -> None:
        while not stop.is_set() or ledger.pending:
            for receipts in ledger.failures().values():
                ledger.told(receipts)
            acks, pages = ledger.acks(LATE)
            ledger.told(acks)
            for receipts in pages.values():
                ledger.told(receipts)
            ledger.old(LATE)

    threads = [threading.Thread(target=f) for f in (feed, work, work, work, tell)]
    for thread in threads:
        thread.start()
    threads[0].join()
    while ledger.on_lease:
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken))
    assert (ledger.pending, ledger.on_lease, ledger.ready) == (0, 0, 0)
