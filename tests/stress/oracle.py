"""What the stress test knows and what it checks.

The truth is in the database: a producer writes `published` in the transaction of the publish, a worker writes
`audit` in the transaction of the ack, so neither can disagree with what was committed, whatever was killed.
Workers also keep a log of every delivery and of what became of it; the checker lays the three side by side.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

# What can become of a delivery. All but "acked" are causes for another one.
ACKED = "acked"
NACKED = "nacked"
TAKEN_BACK = "taken back"  # an earlier message of its key failed
ABANDONED = "abandoned"  # left to expire
ROLLED_BACK = "rolled back"  # consumed in a transaction that did not commit
LOST = "lost"  # PB004
CRASHED = "crashed"  # the connection went away; also a delivery without any outcome
DEAD = "dead"

# Another delivery that did not commit proves nothing about the lease.
UNCOMMITTED = (ROLLED_BACK, CRASHED)


@dataclass(frozen=True)
class Published:
    """A committed event. seq counts its key under a row lock; None: no order was promised."""

    uid: str
    tx: str
    pos: int
    key: str | None
    seq: int | None


@dataclass(frozen=True)
class Acked:
    """A committed ack, in the order of n."""

    n: int
    group: str
    uid: str
    batch: str


@dataclass(frozen=True)
class Delivery:
    group: str
    worker: str
    batch: str
    uid: str
    key: str | None
    seq: int | None
    attempt: int
    asked: float  # before consume was called
    got: float
    lease: float

    @property
    def turn(self) -> int:
        """Deliveries by the database's clock: a slow worker learns of an early one late."""
        return int(self.batch[1:])


@dataclass(frozen=True)
class Outcome:
    group: str
    batch: str
    uid: str
    what: str
    started: float  # before the call that decided it
    ended: float
    until: float  # the lease was good at least until then


class Sink(Protocol):
    """Where a worker's log goes."""

    def delivery(self, record: Delivery) -> None: ...

    def outcome(self, record: Outcome) -> None: ...


@dataclass
class Memory:
    """A log for workers that are threads."""

    deliveries: list[Delivery] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def delivery(self, record: Delivery) -> None:
        self.deliveries.append(record)

    def outcome(self, record: Outcome) -> None:
        self.outcomes.append(record)


class Lines:
    """A log for workers that get killed: one JSON line per record, written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def delivery(self, record: Delivery) -> None:
        self._file.write(json.dumps(["d", asdict(record)]) + "\n")

    def outcome(self, record: Outcome) -> None:
        self._file.write(json.dumps(["o", asdict(record)]) + "\n")

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: Path, into: Memory) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                kind, record = json.loads(line)
            except ValueError:  # killed in the middle of a line
                continue
            if kind == "d":
                into.deliveries.append(Delivery(**record))
            else:
                into.outcomes.append(Outcome(**record))


@dataclass(frozen=True)
class Violation:
    rule: str
    group: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule} [{self.group}] {self.detail}"


@dataclass
class Book:
    """Everything that is known at the end of a run."""

    groups: dict[str, str]  # name to ordering
    published: list[Published]
    acked: list[Acked]
    died: set[tuple[str, str]]  # (group, uid) that were dead letters once: they lost their place in order
    log: Memory


def check(book: Book) -> list[Violation]:
    """Every promise that was broken, with the evidence."""
    found: list[Violation] = []
    known = {p.uid: p for p in book.published}
    what = {(o.group, o.batch, o.uid): o for o in book.log.outcomes}
    deliveries: dict[tuple[str, str], list[Delivery]] = defaultdict(list)
    for d in book.log.deliveries:
        deliveries[d.group, d.uid].append(d)
    acks: dict[tuple[str, str], list[Acked]] = defaultdict(list)
    for a in sorted(book.acked, key=lambda a: a.n):
        acks[a.group, a.uid].append(a)

    found += _never_committed(deliveries, known)
    for group in book.groups:
        found += _lost_or_double(group, known, acks, deliveries, what)
        found += _without_cause(group, deliveries, acks, what)
    for group, ordering in book.groups.items():
        if ordering == "none":
            continue
        rows = [
            known[a.uid] for a in sorted(book.acked, key=lambda a: a.n) if a.group == group and a.uid in known
        ]
        rows = [p for p in rows if (group, p.uid) not in book.died]
        found += _key_order(group, rows, deliveries, what)
        found += _one_holder(group, book.log.deliveries, what)
        if ordering == "stream":
            found += _transaction_order(group, rows)
    return found


Deliveries = dict[tuple[str, str], list[Delivery]]
Outcomes = dict[tuple[str, str, str], Outcome]


def _never_committed(deliveries: Deliveries, known: dict[str, Published]) -> Iterable[Violation]:
    for (group, uid), ds in deliveries.items():
        if uid not in known:
            yield Violation("rolled back event seen", group, f"{uid} in {[d.batch for d in ds]}")


def _story(ds: list[Delivery], what: Outcomes) -> str:
    parts = []
    for d in ds:
        o = what.get((d.group, d.batch, d.uid))
        parts.append(
            f"{d.batch} to {d.worker} attempt {d.attempt} at {d.got:.3f}: {o.what if o else CRASHED}"
        )
    return "; ".join(parts) or "never delivered"


def _lost_or_double(
    group: str,
    known: dict[str, Published],
    acks: dict[tuple[str, str], list[Acked]],
    deliveries: Deliveries,
    what: Outcomes,
) -> Iterable[Violation]:
    for uid, p in known.items():
        n = len(acks.get((group, uid), []))
        if n == 0:
            story = _story(deliveries.get((group, uid), []), what)
            yield Violation("lost", group, f"{uid} key {p.key} seq {p.seq} tx {p.tx}: {story}")
        elif n > 1:
            batches = [a.batch for a in acks[group, uid]]
            yield Violation("acked twice", group, f"{uid} key {p.key} seq {p.seq}: {batches}")


def _without_cause(
    group: str,
    deliveries: Deliveries,
    acks: dict[tuple[str, str], list[Acked]],
    what: Outcomes,
) -> Iterable[Violation]:
    for (g, uid), ds in deliveries.items():
        if g != group or len(ds) < 2:
            continue
        ds.sort(key=lambda d: d.turn)
        batches = [d.batch for d in ds]
        if len(set(batches)) < len(batches):
            yield Violation("twice in one batch", group, f"{uid}: {batches}")
        acked = {a.batch for a in acks.get((group, uid), [])}
        for i, d in enumerate(ds):
            o = what.get((group, d.batch, uid))
            later = [x for x in ds[i + 1 :] if _what(x, what) not in UNCOMMITTED]
            if d.batch in acked and o is not None and o.what == ACKED:
                again = [x for x in later if x.asked > o.ended]
                if again:
                    yield Violation("delivered after its ack", group, f"{uid}: {_story(ds, what)}")
                before = [x for x in later if x.got < o.started]
                if before:
                    yield Violation("late ack accepted", group, f"{uid}: {_story(ds, what)}")
            elif o is not None and o.what == ABANDONED and later and later[0].got < o.until:
                yield Violation("delivered again before its lease ended", group, f"{uid}: {_story(ds, what)}")


def _what(d: Delivery, what: Outcomes) -> str:
    o = what.get((d.group, d.batch, d.uid))
    return o.what if o else CRASHED


def _key_order(
    group: str, rows: list[Published], deliveries: Deliveries, what: Outcomes
) -> Iterable[Violation]:
    last: dict[str, Published] = {}
    for p in rows:
        if p.key is None or p.seq is None:
            continue
        before = last.get(p.key)
        if before is not None and before.seq is not None and p.seq < before.seq:
            stories = [
                f"seq {x.seq} ({x.uid}): {_story(deliveries[group, x.uid], what)}" for x in (p, before)
            ]
            yield Violation("out of order", group, f"key {p.key}: {' AFTER '.join(stories)}")
        last[p.key] = p


def _one_holder(group: str, log: list[Delivery], what: Outcomes) -> Iterable[Violation]:
    """While a key's message is out and will be acked, no other worker gets a message of that key."""
    by_key: dict[str, list[Delivery]] = defaultdict(list)
    for d in log:
        if d.group == group and d.key is not None and d.seq is not None:
            by_key[d.key].append(d)
    for key, ds in by_key.items():
        ds.sort(key=lambda d: d.turn)
        for i, d in enumerate(ds):
            o = what.get((group, d.batch, d.uid))
            if o is None or o.what != ACKED:
                continue
            for x in ds[i + 1 :]:
                if x.asked > o.ended:
                    break
                if x.batch != d.batch and x.got < o.started and _what(x, what) not in UNCOMMITTED:
                    yield Violation(
                        "two holders of a key", group, f"{key}: {d.batch} {d.uid} and {x.batch} {x.uid}"
                    )


def _transaction_order(group: str, rows: list[Published]) -> Iterable[Violation]:
    """Total order: B took a key's lock after A committed, so all of A comes before what B published then."""
    place = {p.uid: i for i, p in enumerate(rows)}
    by_tx: dict[str, list[Published]] = defaultdict(list)
    for p in rows:
        by_tx[p.tx].append(p)
    holders: dict[str, list[Published]] = defaultdict(list)
    for p in rows:
        if p.key is not None and p.seq is not None:
            holders[p.key].append(p)
    ends = {
        tx: max(place[p.uid] for p in ps if p.seq is not None)
        for tx, ps in by_tx.items()
        if any(p.seq for p in ps)
    }
    for key, ps in holders.items():
        ps.sort(key=lambda p: p.seq or 0)
        for a, b in itertools.pairwise(ps):
            if a.tx == b.tx:
                continue
            after = [p for p in by_tx[b.tx] if p.seq is not None and p.pos >= b.pos]
            first = min(after, key=lambda p: place[p.uid])
            if place[first.uid] < ends[a.tx]:
                yield Violation(
                    "out of total order",
                    group,
                    f"{first.uid} of {b.tx} before the end of {a.tx}, which held {key} first",
                )


def report(seed: int, violations: list[Violation], stats: dict[str, Any]) -> str:
    kinds: dict[str, int] = defaultdict(int)
    for v in violations:
        kinds[v.rule] += 1
    lines = [f"seed {seed}: {len(violations)} violations {dict(kinds)}", f"stats: {stats}"]
    lines += [f"  {v}" for v in violations[:25]]
    return "\n".join(lines)
