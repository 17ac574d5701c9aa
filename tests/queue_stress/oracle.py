"""What must hold for the log of a run. A rule accuses only where the times leave no other reading."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from tests.queue_stress.ledger import ACK, CANCEL, DEAD, EXTEND, LAST, NACK, POP, Connection
from tests.stress.oracle import Violation


@dataclass(frozen=True)
class Sent:
    id: int
    queue: str
    uid: str
    tx: str
    key: str | None
    priority: int
    due: datetime
    expires_at: datetime | None
    dedupe: str | None = None


@dataclass(frozen=True)
class Delivered:
    """asked <= at (the claim's own clock) <= got, which is after the claim."""

    queue: str
    id: int
    claim: int
    attempt: int
    key: str | None
    worker: str
    asked: datetime
    at: datetime
    got: datetime
    due: datetime


@dataclass(frozen=True)
class Ended:
    """Something done between began and done; due is what the message's due time was then, if it still was."""

    queue: str
    id: int
    claim: int
    what: str
    began: datetime
    done: datetime
    due: datetime | None


@dataclass(frozen=True)
class Died:
    queue: str
    id: int
    claim: int
    at: datetime


@dataclass
class Book:
    """Everything that is known at the end of a run."""

    now: datetime
    attempts: dict[str, int]
    limits: dict[str, int] = field(
        default_factory=dict
    )  # concurrency of keys of "keyed", which did not change
    rates: dict[str, tuple[float, int]] = field(default_factory=dict)
    rates_until: datetime | None = None
    sent: list[Sent] = field(default_factory=list)
    committed: dict[str, datetime] = field(default_factory=dict)
    delivered: list[Delivered] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    died: list[Died] = field(default_factory=list)  # and were redriven
    dead: list[Died] = field(default_factory=list)  # and still are
    waiting: set[int] = field(default_factory=set)
    expired: dict[str, int] = field(default_factory=dict)  # what the engine has counted
    kept: Counter[str] = field(default_factory=Counter)  # what expired and is a dead letter
    archived: dict[str, Counter[int]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)


def read(c: Connection, book: Book, archives: list[str]) -> None:
    """The log and what is left in the queues."""

    def rows(kind: type[Any], query: str) -> list[Any]:
        with c.cursor(row_factory=class_row(kind)) as cur:
            return cur.execute(query.encode()).fetchall()

    book.sent = rows(Sent, "select * from sent")
    columns = "queue, id, claim, attempt, key, worker, asked, at, got, due"
    book.delivered = rows(Delivered, f"select {columns} from delivered")
    book.ended = rows(Ended, "select queue, id, claim, what, began, done, due from ended order by n")
    book.died = rows(Died, "select * from died")
    book.dead = rows(
        Died,
        "select q.name as queue, d.event_id as id, d.claim, d.died_at as at from postbus.dead_letter d"
        " join postbus.queue q on q.id = d.queue_id",
    )
    book.waiting = {r[0] for r in c.execute("select id from message").fetchall()}
    for queue, n in c.execute("select name, expired from postbus.list_queues()").fetchall():
        book.expired[queue] = n
    for queue, n in c.execute(
        "select q.name, count(*) from postbus.dead_letter d join postbus.queue q on q.id = d.queue_id"
        " where d.reason = 'expired' group by 1"
    ).fetchall():
        book.kept[queue] = n
    for queue in archives:
        ids = c.execute("select id from postbus.archived(%s, max => 1000000)", [queue]).fetchall()
        book.archived[queue] = Counter(r[0] for r in ids)


@dataclass
class Life:
    """The story of one message, in the order of its claims."""

    sent: Sent
    delivered: list[Delivered] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    died: list[Died] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.sent.queue} {self.sent.id} key {self.sent.key} due {self.sent.due:%S.%f}"]
        events: list[tuple[datetime, str]] = []
        for d in self.delivered:
            span = f"{d.asked:%S.%f}/{d.at:%S.%f}/{d.got:%S.%f} until {d.due:%S.%f}"
            events.append((d.got, f"claim {d.claim} attempt {d.attempt} to {d.worker} {span}"))
        events += [
            (e.done, f"{e.what} of {e.claim} {e.began:%S.%f}-{e.done:%S.%f} due {e.due}") for e in self.ended
        ]
        events += [(x.at, f"died as {x.claim} {x.at:%S.%f}") for x in self.died]
        return "; ".join(parts + [text for _, text in sorted(events)])


def check(book: Book) -> list[Violation]:
    """Every promise that was broken, with the evidence."""
    found: list[Violation] = []
    lives = {s.id: Life(s) for s in book.sent}
    for d in sorted(book.delivered, key=lambda d: d.claim):
        if d.id in lives:
            lives[d.id].delivered.append(d)
    for e in book.ended:
        if e.id in lives:
            lives[e.id].ended.append(e)
    for x in book.died + book.dead:
        if x.id in lives:
            lives[x.id].died.append(x)
    ghosts = book.seen | {d.id for d in book.delivered} | {e.id for e in book.ended} | book.waiting
    found += [Violation("rolled back message seen", "-", str(g)) for g in sorted(ghosts - lives.keys())]
    found += _fates(book, lives)
    for life in lives.values():
        found += _receipts(book, life)
        found += _one_owner(life)
    found += _keys(book, lives)
    return found


def _fates(book: Book, lives: dict[int, Life]) -> Iterable[Violation]:
    """Every message has one end. What expired has left nothing but a count."""
    gone: Counter[str] = Counter()
    dead = {x.id for x in book.dead}
    for life in lives.values():
        id_, queue = life.sent.id, life.sent.queue
        last = [e.what for e in life.ended if e.what in LAST]
        ends = last + ["dead"] * (id_ in dead) + ["waiting"] * (id_ in book.waiting)
        if len(ends) > 1:
            yield Violation(f"two ends: {', '.join(sorted(ends))}", queue, str(life))
        elif (
            not ends
            and life.sent.expires_at is not None
            and life.sent.expires_at <= book.now
            and not life.died
        ):
            gone[queue] += 1
        elif not ends:
            yield Violation("lost", queue, str(life))
        if queue in book.archived:
            n = sum(w in (ACK, POP) for w in last)
            if book.archived[queue][id_] != n:
                yield Violation("archive", queue, f"{book.archived[queue][id_]} times: {life}")
    # Where the queue keeps what expired, it is a dead letter and is counted as well.
    for queue, n in book.expired.items():
        if gone[queue] + book.kept[queue] != n:
            counts = f"{gone[queue]} expired, {book.kept[queue]} were kept, {n} were counted"
            yield Violation("expired miscounted", queue, counts)
    keys = Counter((s.queue, s.dedupe) for s in book.sent if s.dedupe is not None)
    yield from (Violation("sent twice", q, str(k)) for (q, k), n in keys.items() if n > 1)


def _receipts(book: Book, life: Life) -> Iterable[Violation]:
    queue = life.sent.queue
    for e in life.ended:
        if e.what == CANCEL:
            continue
        later = [d for d in life.delivered if d.claim > e.claim]
        again = [
            x
            for x in life.ended
            if x.claim == e.claim and x is not e and x.what != EXTEND and e.what != EXTEND
        ]
        if e.what in (ACK, POP) and later:
            yield Violation("delivered after its end", queue, str(life))
        elif any(d.got < e.began for d in later):
            yield Violation("late receipt accepted", queue, str(life))
        elif again:
            yield Violation("receipt used twice", queue, str(life))
    claims = [d.claim for d in life.delivered]
    if len(set(claims)) < len(claims):
        yield Violation("one claim twice", queue, str(life))
    attempt, before = 0, 0
    for d in life.delivered:
        if any(before <= x.claim < d.claim for x in life.died):
            attempt = 0
        # A claim that was rolled back has left no trace.
        if d.attempt != attempt + 1:
            yield Violation("attempts miscounted", queue, str(life))
        attempt, before = d.attempt, d.claim
        if d.attempt > book.attempts[queue]:
            yield Violation("more attempts than allowed", queue, str(life))
        if d.at < life.sent.due:
            yield Violation("delivered too early", queue, str(life))
        if life.sent.expires_at is not None and d.at >= life.sent.expires_at and not life.died:
            yield Violation("delivered after it expired", queue, str(life))


def _one_owner(life: Life) -> Iterable[Violation]:
    """Another delivery only from the due time on that the last act has left."""
    for d, after in itertools.pairwise(life.delivered):
        if any(d.claim <= x.claim < after.claim for x in life.died):
            continue
        acts = [e for e in life.ended if e.claim == d.claim]
        due = next((e.due for e in reversed(acts) if e.what in (NACK, EXTEND) and e.due is not None), d.due)
        if after.at < due:
            yield Violation("two owners", life.sent.queue, str(life))


Span = tuple[datetime, datetime, Delivered]


def _spans(life: Life) -> Iterable[Span]:
    """When the message was out for certain."""
    for d in life.delivered:
        start, due = d.got, d.due
        for e in (e for e in life.ended if e.claim == d.claim):
            if e.what != EXTEND:
                due = min(due, e.began)
            elif e.due is not None:
                if e.began > due:  # it had run out, and nobody had come
                    if start < due:
                        yield start, due, d
                    start = e.done
                due = e.due
        if start < due:
            yield start, due, d


def _keys(book: Book, lives: dict[int, Life]) -> Iterable[Violation]:
    by_key: dict[str, list[Life]] = defaultdict(list)
    for life in lives.values():
        if life.sent.queue == "keyed" and life.sent.key is not None:
            by_key[life.sent.key].append(life)
    for key, limit in book.limits.items():
        ls = by_key[key]
        steps = []
        for start, end, d in (s for life in ls for s in _spans(life)):
            steps += [(start, 1, d), (end, -1, d)]
        steps.sort(key=lambda s: (s[0], s[1]))
        out: list[Delivered] = []
        for _, step, d in steps:
            if step < 0:
                out.remove(d)
                continue
            out.append(d)
            if len(out) > limit:
                who = "; ".join(f"{x.id}:{x.claim} {x.worker} {x.got:%S.%f}-{x.due:%S.%f}" for x in out)
                yield Violation(f"more than {limit} at once", key, who)
        if limit == 1:
            yield from _first_in_first_out(book, key, ls)
    for key, (rate, burst) in book.rates.items():
        yield from _rate(book, key, rate, burst, by_key[key])


def _first_in_first_out(book: Book, key: str, lives: list[Life]) -> Iterable[Violation]:
    """When a message goes out first, none is left that comes before it by (priority, due, id)."""
    mine = [x for x in lives if x.sent.tx in book.committed and x.sent.expires_at is None]
    for later in lives:
        # Popped first: when, is not known.
        if not later.delivered or later.delivered[0].attempt != 1:
            continue
        d = later.delivered[0]
        for first in mine:
            s, t = first.sent, later.sent
            before = (s.priority > t.priority and s.due <= d.at) or (
                s.priority == t.priority and (s.due, s.id) < (t.due, t.id)
            )
            if not before or book.committed[s.tx] > d.asked:
                continue
            over = [e.began for e in first.ended if e.what in (*LAST, DEAD)] + [x.at for x in first.died]
            if min(over, default=book.now) > d.got:
                yield Violation("out of order", key, f"{later} BEFORE {first}")


def _rate(book: Book, key: str, rate: float, burst: int, lives: list[Life]) -> Iterable[Violation]:
    """In any window w at most burst + rate * w deliveries."""
    ats = sorted(d.at for life in lives for d in life.delivered)
    if book.rates_until is not None:
        ats = ats[: bisect_left(ats, book.rates_until)]
    for i, j in itertools.combinations(range(len(ats)), 2):
        window = (ats[j] - ats[i]).total_seconds()
        if j - i + 1 > burst + rate * window + 0.001:
            yield Violation("rate exceeded", key, f"{j - i + 1} in {window:.4f} s")
            return
