"""What a group owes its readers, without a database: the model that the engine is compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Receipt = tuple[int, int]
NOW = (0.0, 0.0)


@dataclass
class Event:
    """One event. Steps count what the test did, one after the other."""

    id: int
    key: str | None
    tx: int
    published: int
    committed: int | None = None


@dataclass
class Log:
    """Everything that was ever published."""

    events: dict[int, Event] = field(default_factory=dict)
    step: int = 0

    def publish(self, id: int, key: str | None, tx: int) -> None:
        assert id not in self.events
        assert id > max(self.events, default=0), "ids go up"
        self.events[id] = Event(id, key, tx, self.step)

    def commit(self, tx: int) -> None:
        for e in self.events.values():
            if e.tx == tx:
                e.committed = self.step

    @property
    def committed(self) -> set[int]:
        return {e.id for e in self.events.values() if e.committed is not None}

    @staticmethod
    def before(x: Event, y: Event) -> bool:
        """Does everybody agree that x comes before y? Events of transactions side by side have no order."""
        if x.tx == y.tx:
            return x.id < y.id
        return x.committed is not None and x.committed < y.published


@dataclass
class Lease:
    open: list[int]
    until: float


@dataclass
class Group:
    """One group: what became of each event, by id. An event without a state is new."""

    log: Log
    ordering: str
    max_attempts: int
    skipped: set[int] = field(default_factory=set)
    state: dict[int, str] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    due: dict[int, tuple[float, float]] = field(default_factory=dict)  # not before, surely from
    dead: Counter[tuple[int, int]] = field(default_factory=Counter)
    loose: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)
    lost: list[Receipt] = field(default_factory=list)

    def place(self, skipped: set[int]) -> None:
        """Start again: everything but these is owed, and nothing is out."""
        for token in list(self.leases):
            self._end(token)
        self.skipped = set(skipped)
        self.state.clear()
        self.attempts.clear()
        self.due.clear()
        self.loose.clear()
        self.dead.clear()

    def owed(self) -> set[int]:
        """Committed, wanted, and neither finished nor given up."""
        return {
            i for i in self.log.committed - self.skipped if self.state.get(i, "new") not in ("done", "dead")
        }

    def _end(self, token: int) -> None:
        self.lost += [(token, i) for i in self.leases.pop(token).open]

    def _leave(self, token: int, ids: list[int]) -> None:
        lease = self.leases[token]
        self.lost += [(token, i) for i in ids]
        lease.open = [i for i in lease.open if i not in ids]
        if not lease.open:
            del self.leases[token]

    # What the engine did.

    def delivered(self, token: int, got: list[tuple[int, int]], now: float, until: float) -> None:
        """A batch of (i, attempt)."""
        ids = [i for i, _ in got]
        assert ids == sorted(set(ids)), "a batch is in order and has nothing twice"
        if self.ordering == "stream":
            assert not self.leases, "one batch at a time"
        for place, (i, attempt) in enumerate(got):
            assert i in self.log.committed, f"{i} is not committed"
            assert i not in self.skipped, f"{i} is before the position"
            state = self.state.get(i, "new")
            assert state in ("new", "waiting"), f"{i} is {state}"
            assert attempt == self.attempts[i] + 1, f"{i}: attempt {attempt} after {self.attempts[i]}"
            if self.ordering == "none":
                assert self.due.get(i, NOW)[0] <= now, f"{i} is not due"
            self._in_order(i, ids[:place])
        for i in ids:
            self.state[i] = "leased"
            self.attempts[i] += 1
            self.due.pop(i, None)
        self.leases[token] = Lease(ids, until)

    def _in_order(self, i: int, earlier: list[int]) -> None:
        if self.ordering == "none":
            return
        y = self.log.events[i]
        if self.ordering == "key" and y.key is None:
            return
        for x_id in self.owed() - set(earlier) - {i}:
            x = self.log.events[x_id]
            if self.ordering == "key" and x.key != y.key:
                continue
            assert self.state.get(x_id) != "leased", f"{i} is out while {x_id} of its key is"
            if x_id not in self.loose and i not in self.loose:
                assert not Log.before(x, y), f"{i} overtakes {x_id}, which is {self.state.get(x_id, 'new')}"

    def finished(self, token: int, ids: list[int]) -> None:
        for i in ids:
            self.state[i] = "done"
        self._leave(token, ids)

    def failed(self, token: int, ids: list[int], due: tuple[float, float]) -> None:
        """Given back one by one, or all at once by a lease that ran out."""
        back = []
        held: set[str | None] = set()
        for i in list(self.leases[token].open):
            key = self.log.events[i].key
            behind = (self.ordering == "stream" and bool(held)) or (
                self.ordering == "key" and key is not None and key in held
            )
            if i in ids:
                if self.attempts[i] >= self.max_attempts:
                    self.state[i] = "dead"
                    self.dead[(i, self.attempts[i])] += 1
                    continue
                self.state[i] = "waiting"
                self.due[i] = due
                held.add(key)
            elif behind:
                self.state[i] = "waiting"
                self.attempts[i] -= 1
                back.append(i)
        self._leave(token, ids + back)

    def expired(self, now: float, still: set[int]) -> None:
        """The engine took these leases back: all but `still`."""
        assert still <= set(self.leases), "a lease that should be gone"
        for token in set(self.leases) - still:
            assert self.leases[token].until <= now, f"lease s{token} was taken away before its time"
            self.failed(token, self.leases[token].open, NOW)

    def redriven(self) -> None:
        for i, _ in self.dead:
            self.state[i] = "waiting"
            self.attempts[i] = 0
            self.due[i] = NOW
            self.loose.add(i)
        self.dead.clear()

    # What has to be there.

    def nothing_to_get(self, now: float) -> None:
        """A consume that returned nothing was right to, as far as one can tell from outside."""
        assert not [t for t, lease in self.leases.items() if lease.until <= now], "an expired lease is left"
        if self.ordering == "none":
            ready = {
                i for i in self.owed() if self.state.get(i) != "leased" and self.due.get(i, NOW)[1] <= now
            }
        elif self.leases or "waiting" in self.state.values():
            return
        else:
            ready = self.owed()
        assert not ready, f"{sorted(ready)} could be had"
