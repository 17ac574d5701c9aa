"""The oracle itself: every rule finds its fault, and a clean book has none."""

from __future__ import annotations

import pytest

from tests.stress.oracle import (
    ABANDONED,
    ACKED,
    LOST,
    NACKED,
    ROLLED_BACK,
    Acked,
    Book,
    Delivery,
    Memory,
    Outcome,
    Published,
    check,
)


class Story:
    """A book written line by line: time goes on by itself."""

    def __init__(self, ordering: str = "key") -> None:
        self.book = Book({"g": ordering}, [], [], set(), Memory())
        self.clock = 0.0

    def publish(self, uid: str, key: str = "k", seq: int = 1, tx: str | None = None, pos: int = 1) -> Story:
        self.book.published.append(Published(uid, tx or uid, pos, key, seq))
        return self

    def deliver(self, uid: str, batch: str, key: str = "k", lease: float = 10.0) -> Story:
        self.clock += 1
        self.book.log.deliveries.append(
            Delivery("g", "w", batch, uid, key, 1, 1, self.clock - 0.5, self.clock, lease)
        )
        return self

    def end(self, uid: str, batch: str, what: str, until: float = 0.0) -> Story:
        self.clock += 1
        self.book.log.outcomes.append(Outcome("g", batch, uid, what, self.clock - 0.2, self.clock, until))
        if what == ACKED:
            self.book.acked.append(Acked(len(self.book.acked), "g", uid, batch))
        return self

    def rules(self) -> set[str]:
        return {v.rule for v in check(self.book)}


def test_a_clean_book() -> None:
    s = Story().publish("a", seq=1).publish("b", seq=2)
    s.deliver("a", "s1").end("a", "s1", NACKED).deliver("a", "s2").end("a", "s2", ACKED)
    s.deliver("b", "s3").end("b", "s3", ROLLED_BACK).deliver("b", "s4").end("b", "s4", ACKED)
    assert s.rules() == set()


def test_lost() -> None:
    assert Story().publish("a").rules() == {"lost"}


def test_rolled_back_event() -> None:
    assert Story().deliver("ghost", "s1").end("ghost", "s1", NACKED).rules() == {"rolled back event seen"}


def test_acked_twice() -> None:
    s = (
        Story("none")
        .publish("a")
        .deliver("a", "s1")
        .end("a", "s1", ACKED)
        .deliver("a", "s2")
        .end("a", "s2", ACKED)
    )
    assert s.rules() == {"acked twice", "delivered after its ack"}


def test_late_ack() -> None:
    s = Story("none").publish("a").deliver("a", "s1").deliver("a", "s2").end("a", "s2", NACKED)
    assert s.end("a", "s1", ACKED).rules() == {"late ack accepted"}


def test_late_ack_beside_a_rolled_back_delivery() -> None:
    s = Story("none").publish("a").deliver("a", "s1").deliver("a", "s2").end("a", "s2", ROLLED_BACK)
    assert s.end("a", "s1", ACKED).rules() == set()


def test_delivered_before_the_lease_ended() -> None:
    s = Story("none").publish("a").deliver("a", "s1").end("a", "s1", ABANDONED, until=100.0)
    assert s.deliver("a", "s2").end("a", "s2", ACKED).rules() == {"delivered again before its lease ended"}


def test_a_slow_worker_learns_of_its_delivery_late() -> None:
    s = Story().publish("a").deliver("a", "s2").deliver("a", "s1").end("a", "s1", LOST)
    assert s.end("a", "s2", ACKED).rules() == set()


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_out_of_order(ordering: str) -> None:
    s = Story(ordering).publish("a", seq=1, tx="t").publish("b", seq=2, tx="t", pos=2)
    s.deliver("b", "s1").end("b", "s1", ACKED).deliver("a", "s2").end("a", "s2", ACKED)
    assert s.rules() == {"out of order"}


def test_dead_letters_lost_their_place() -> None:
    s = Story().publish("a", seq=1).publish("b", seq=2)
    s.deliver("b", "s1").end("b", "s1", ACKED).deliver("a", "s2").end("a", "s2", ACKED)
    s.book.died.add(("g", "a"))
    assert s.rules() == set()


def test_out_of_total_order() -> None:
    s = Story("stream").publish("a1", "k", 1, "A", 1).publish("a2", "x", 1, "A", 2)
    s.publish("b1", "k", 2, "B", 1)
    for i, uid in enumerate(["a1", "b1", "a2"]):
        s.deliver(uid, f"s{i}", key=uid).end(uid, f"s{i}", ACKED)
    assert s.rules() == {"out of total order"}


def test_two_holders() -> None:
    s = Story().publish("a", seq=1).publish("b", seq=2).deliver("a", "s1").deliver("b", "s2")
    assert s.end("a", "s1", ACKED).end("b", "s2", ACKED).rules() == {"two holders of a key"}
