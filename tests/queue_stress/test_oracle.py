"""The oracle itself: every rule finds its fault, and a clean book has none."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

from tests.queue_stress.ledger import ACK, CANCEL, EXTEND, NACK
from tests.queue_stress.oracle import Book, Delivered, Died, Ended, Sent, check

START = datetime(2030, 1, 1, tzinfo=UTC)


class Story:
    """A book written line by line: each line is a second after the one before."""

    def __init__(self) -> None:
        self.book = Book(START + timedelta(days=1), {"keyed": 3}, {"k": 1}, {"r": (0.5, 1)})
        self.clock = 0.0

    def at(self, seconds: float) -> datetime:
        return START + timedelta(seconds=seconds)

    def send(self, id: int, key: str = "k", ttl: float | None = None, dedupe: str | None = None) -> Story:
        self.clock += 1
        due = self.at(self.clock)
        expires_at = None if ttl is None else self.at(self.clock + ttl)
        self.book.sent.append(Sent(id, "keyed", "u", f"t{id}", key, 0, due, expires_at, dedupe))
        self.book.committed[f"t{id}"] = self.at(self.clock + 0.1)
        return self

    def deliver(
        self, id: int, claim: int = 1, attempt: int = 1, lease: float = 100.0, key: str = "k"
    ) -> Story:
        self.clock += 1
        asked, at, got = (self.at(self.clock + x) for x in (0, 0.1, 0.2))
        due = self.at(self.clock + 0.1 + lease)
        self.book.delivered.append(Delivered("keyed", id, claim, attempt, key, "w", asked, at, got, due))
        return self

    def end(self, id: int, what: str = ACK, claim: int = 1, due: float | None = None) -> Story:
        self.clock += 1
        left = None if due is None else self.at(self.clock + due)
        self.book.ended.append(
            Ended("keyed", id, claim, what, self.at(self.clock), self.at(self.clock + 0.1), left)
        )
        return self

    def rules(self) -> set[str]:
        return {v.rule for v in check(self.book)}


def test_a_clean_book() -> None:
    s = Story().send(1).send(2).send(3, ttl=0.5)
    s.book.expired["keyed"] = 1
    s.deliver(1).end(1, NACK, due=0.5).deliver(1, claim=3, attempt=2, lease=0.5)
    s.deliver(1, claim=4, attempt=3).end(1, EXTEND, 4, due=200).end(1, ACK, 4)
    s.deliver(2).end(2)
    assert s.rules() == set()


def test_lost() -> None:
    assert Story().send(1).rules() == {"lost"}


def test_an_expired_message_is_counted() -> None:
    s = Story().send(1, ttl=5)
    s.book.expired["keyed"] = 0
    assert s.rules() == {"expired miscounted"}


def test_a_dead_letter_and_a_waiting_message_are_not_lost() -> None:
    s = Story().send(1).send(2)
    s.book.waiting.add(1)
    s.book.dead.append(Died("keyed", 2, 1, s.at(3)))
    assert s.rules() == set()


def test_two_ends() -> None:
    s = Story().send(1).deliver(1).end(1).end(1, CANCEL, claim=-1)
    assert s.rules() == {"two ends: ack, cancel"}


def test_rolled_back_message() -> None:
    assert Story().deliver(7).rules() == {"rolled back message seen"}


def test_sent_twice() -> None:
    s = Story().send(1, dedupe="d").send(2, dedupe="d").deliver(1).end(1).deliver(2).end(2)
    assert s.rules() == {"sent twice"}


def test_archive() -> None:
    s = Story().send(1).deliver(1).end(1)
    s.book.archived["keyed"] = Counter({1: 2})
    assert s.rules() == {"archive"}


def test_two_owners() -> None:
    s = Story().send(1).deliver(1, lease=10).deliver(1, claim=2, attempt=2).end(1, ACK, 2)
    assert s.rules() == {"two owners", "more than 1 at once"}


def test_before_its_delay_after_a_nack_is_over() -> None:
    s = Story().send(1).deliver(1).end(1, NACK, due=10).deliver(1, claim=3, attempt=2).end(1, ACK, 3)
    assert s.rules() == {"two owners"}


def test_late_receipt() -> None:
    s = Story().send(1).deliver(1, lease=0.5).deliver(1, claim=2, attempt=2)
    assert "late receipt accepted" in s.end(1, EXTEND, 1, due=5).end(1, ACK, 2).rules()


def test_receipt_of_an_ack() -> None:
    s = Story().send(1).deliver(1, lease=0.5).deliver(1, claim=2, attempt=2).end(1, ACK, 1)
    assert s.rules() == {"delivered after its end"}


def test_receipt_used_twice() -> None:
    s = Story().send(1).deliver(1).end(1, NACK, due=0).end(1, ACK)
    assert s.rules() == {"receipt used twice"}


def test_attempts() -> None:
    s = Story().send(1)
    for n in range(1, 5):
        s.deliver(1, claim=n, attempt=n, lease=0.5)
    assert s.end(1, ACK, 4).rules() == {"more attempts than allowed"}
    assert Story().send(1).deliver(1, attempt=2).end(1).rules() == {"attempts miscounted"}


def test_a_redriven_message_begins_again() -> None:
    s = Story().send(1).deliver(1)
    s.book.died.append(Died("keyed", 1, 1, s.at(s.clock + 1)))
    s.clock += 200
    assert s.deliver(1, claim=3, attempt=1).end(1, ACK, 3).rules() == set()


def test_delivered_after_it_expired() -> None:
    s = Story().send(1, ttl=0.5).deliver(1).end(1)
    s.book.expired["keyed"] = 0
    assert s.rules() == {"delivered after it expired"}


def test_too_many_at_once_and_out_of_order() -> None:
    s = Story().send(1).send(2).deliver(1).deliver(2).end(1).end(2)
    assert s.rules() == {"more than 1 at once", "out of order"}


def test_out_of_order() -> None:
    s = Story().send(1).send(2).deliver(2).end(2).deliver(1).end(1)
    assert s.rules() == {"out of order"}


def test_out_of_order_around_a_nack() -> None:
    s = Story().send(1).send(2).deliver(1).end(1, NACK, due=0)
    s.deliver(2).end(2).deliver(1, claim=3, attempt=2).end(1, ACK, 3)
    assert s.rules() == {"out of order"}


def test_a_message_that_was_not_yet_committed_has_no_turn() -> None:
    s = Story().send(1).send(2).deliver(2)
    s.book.committed["t1"] = s.at(s.clock + 0.05)
    assert s.end(2).deliver(1).end(1).rules() == set()


def test_rate() -> None:
    s = Story().send(1, "r").send(2, "r").deliver(1, key="r").end(1)
    assert s.deliver(2, key="r").end(2).rules() == set()
    s = Story().send(1, "r").send(2, "r").deliver(1, key="r").deliver(2, key="r").end(1).end(2)
    assert s.rules() == {"rate exceeded"}
