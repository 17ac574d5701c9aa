"""What the demo did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """What happened, and what should not have.

    Attributes:
        committed: transactions that wrote an order.
        rolled_back: those that changed their mind.
        published: events of the committed ones.
        mails: payments among them, each of which sends an e-mail.
        changes: of rows of the table.
        taken_over: messages that the killed worker had in hand.
        recovery: seconds until all of them were done by somebody else.
        again: deliveries that were not the first.
        latency: median seconds from the event to its bill.
    """

    committed: int = 0
    rolled_back: int = 0
    published: int = 0
    mails: int = 0
    changes: int = 0
    taken_over: int = 0
    recovery: float = 0.0
    dead_letters: int = 0
    redriven: int = 0
    again: int = 0
    latency: float = 0.0
    handled: int = 0
    checks: list[tuple[str, bool]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """The checks that failed."""
        return [name for name, held in self.checks if not held]


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    stage: str
    transactions: int
    billed: int
    analysed: int
    mailed: int
    mirrored: int
    dead: int

    def settled(self, result: Result) -> bool:
        """Whether everything is done that can be."""
        return (
            self.billed + self.dead >= result.published
            and self.analysed >= result.published
            and self.mailed >= result.mails
            and self.mirrored >= result.changes
        )
