"""A queue without a database: the model that the engine is compared with."""

from __future__ import annotations

import builtins
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta

MAX_ATTEMPTS = 3
AGEING = timedelta(seconds=10)


@dataclass
class Message:
    id: int
    key: str | None
    type: str
    priority: int
    due: datetime
    expires_at: datetime | None
    keyed: bool
    attempt: int = 0
    receipt: str | None = None  # the one that is good
    out: bool = False  # a worker has it, or had it last
    held: bool = False  # it takes a place of its key, or is the next to
    state: str | None = None

    @property
    def rank(self) -> tuple[datetime, int, datetime, int]:
        """A queue without key policies hands out the least first."""
        return (self.due - self.priority * AGEING, -self.priority, self.due, self.id)

    @property
    def place(self) -> tuple[bool, int, datetime, int]:
        """Inside its key."""
        return (not self.held, -self.priority, self.due, self.id)


@dataclass
class Queue:
    """Messages by id, dead letters as (id, attempt), and how many have expired."""

    keep_expired: bool
    now: datetime
    keyed: bool = False
    default: int | None = None
    own: dict[str, int | None] = field(default_factory=dict)
    paused: bool = False
    messages: dict[int, Message] = field(default_factory=dict)
    dead: dict[int, Message] = field(default_factory=dict)
    expired: int = 0
    stale: list[str] = field(default_factory=list)

    def places(self, key: str) -> int | None:
        return self.own.get(key, self.default)

    # What there is.

    def ready(self, m: Message) -> bool:
        return m.due <= self.now

    def too_old(self, m: Message) -> bool:
        return m.expires_at is not None and m.expires_at <= self.now and (not m.out or self.ready(m))

    def given_up(self, m: Message) -> bool:
        """It must not be delivered any more; whoever comes across it takes it out."""
        return self.too_old(m) or (m.attempt >= MAX_ATTEMPTS and self.ready(m))

    def candidates(self) -> list[Message]:
        return [m for m in self.messages.values() if self.ready(m) and not self.given_up(m)]

    def running(self, key: str) -> int:
        return sum(m.held and not self.ready(m) for m in self.messages.values() if m.keyed and m.key == key)

    def state_of(self, m: Message) -> str:
        return "ready" if self.ready(m) else "in_flight" if m.out else "delayed"

    # What happens.

    def buried(self, present: set[int]) -> None:
        """Some that must not be delivered are gone: a claim or upkeep has met them."""
        for m in [m for m in self.messages.values() if m.id not in present]:
            assert self.given_up(m), f"{m} is gone"
            self.bury(m, expired=self.too_old(m))

    def bury(self, m: Message, expired: bool) -> None:
        self.gone(m)
        self.expired += expired
        if self.keep_expired or not expired:
            self.dead[m.id] = m

    def gone(self, m: Message) -> None:
        del self.messages[m.id]
        if m.receipt is not None:
            self.stale.append(m.receipt)
            m.receipt = None

    def received(self, got: list[int], max: int, type: str | None) -> None:
        """Are these the ones that had to be handed out?"""
        assert len(got) <= max
        wanted = [m for m in self.candidates() if type is None or m.type == type]
        if self.paused:
            assert got == []
        elif not self.keyed:
            assert got == [m.id for m in sorted(wanted, key=lambda m: m.rank)[:max]]
        else:
            self._received_keyed(got, max, type)

    def _received_keyed(self, got: list[int], max: int, type: str | None) -> None:
        by_key: dict[str | None, list[Message]] = defaultdict(list)
        for m in self.candidates():
            by_key[m.key].append(m)
        left = 0
        for key, messages in by_key.items():
            mine = [i for i in got if i in {m.id for m in messages}]
            if key is None:
                free = [
                    m.id for m in sorted(messages, key=lambda m: m.rank) if type is None or m.type == type
                ]
            else:
                messages.sort(key=lambda m: m.place)
                # A type that is not wanted stands in the way of what comes after it.
                stop = next((i for i, m in enumerate(messages) if type not in (None, m.type)), len(messages))
                places = self.places(key)
                allowed = len(messages) if places is None else places - self.running(key)
                free = [m.id for m in messages[: min(stop, builtins.max(0, allowed))]]
            assert mine == free[: len(mine)], f"key {key}: {mine} of {free}"
            left += len(free) - len(mine)
        assert len(set(got)) == len(got)
        assert set(got) <= {m.id for ms in by_key.values() for m in ms}
        assert len(got) == max or left == 0, f"{left} more could have been had"

    def take(self, id: int, receipt: str, until: datetime) -> Message:
        m = self.messages[id]
        if m.receipt is not None:
            self.stale.append(m.receipt)
        m.receipt, m.due, m.out = receipt, until, True
        m.attempt += 1
        m.held = m.keyed
        return m

    def nack(self, m: Message, state: str | None) -> bool:
        """True: it comes again, and the caller sets when."""
        assert m.receipt is not None
        m.state = state or m.state
        if m.attempt >= MAX_ATTEMPTS:
            self.bury(m, expired=False)
            return False
        self.stale.append(m.receipt)
        m.receipt, m.out = None, False
        m.held = m.keyed and m.key is not None and self.places(m.key) == 1
        return True

    def release(self, m: Message) -> None:
        """The caller sets when it was due."""
        assert m.receipt is not None
        self.stale.append(m.receipt)
        m.receipt, m.out, m.held = None, False, m.keyed
        m.attempt -= 1

    def redrive(self, m: Message) -> None:
        del self.dead[m.id]
        m.due, m.expires_at, m.attempt, m.out, m.held = self.now, None, 0, False, False
        m.keyed = self.keyed and m.key is not None
        self.messages[m.id] = m

    def policy(self, key: str | None, concurrency: int | None) -> None:
        if key is None:
            self.default = concurrency
        else:
            self.own[key] = concurrency
        self.keyed = True
        for m in self.messages.values():
            if m.key is not None and not m.keyed:
                m.keyed, m.held = True, m.out
