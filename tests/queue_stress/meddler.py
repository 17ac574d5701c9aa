"""Somebody who cancels, redrives and configures while everybody works."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from psycopg.types.json import Jsonb

from tests.queue_stress import ledger
from tests.queue_stress.producers import LOOSE, QUEUES, Sent
from tests.stress.actors import GONE, Actor, Connection


@dataclass
class Meddler(Actor):
    """Cancels, redrives, and changes options and policies while everybody works."""

    sent: Sent = field(default_factory=Sent)
    queues: list[str] = field(default_factory=lambda: QUEUES)

    def step(self) -> None:
        weights = [6, 1, 2, 1, 2]
        what = self.rnd.choices(
            [self._cancel, self._redrive, self._policy, self._late, self._options], weights
        )[0]
        try:
            self.conn.execute("begin")
            what(self.conn)
            self.conn.execute("commit")
        except GONE:
            self.close()

    def _cancel(self, c: Connection) -> None:
        if not self.sent.ids:
            return
        queue = self.rnd.choice(self.sent.ids)[0]
        some = [i for q, i in self.rnd.choices(self.sent.ids[-200:], k=5) if q == queue]
        row = c.execute(
            "select statement_timestamp(), postbus.cancel(%s, %s::bigint[])", [queue, some]
        ).fetchone()
        assert row is not None
        ledger.note(c, queue, ledger.CANCEL, row[0], [(i, -1) for i in row[1]])
        self.tally("cancelled", len(row[1]))

    def _redrive(self, c: Connection) -> None:
        queue = self.rnd.choice(self.queues)
        c.execute(ledger.REDRIVE, {"queue": queue})

    def _policy(self, c: Connection) -> None:
        key = self.rnd.choice([None, *LOOSE])
        if "keyed" not in self.queues:
            return
        c.execute(
            "select postbus.set_key_policy('keyed', %s, concurrency => %s, rate => %s, weight => %s)",
            [key, self.rnd.choice([None, 1, 2]), self.rnd.choice([None, 200.0]), self.rnd.choice([1, 3])],
        )
        self.tally("policies")

    def _late(self, c: Connection) -> None:
        """A queue that had no policies gets one, and loses it again."""
        if "late" in self.queues:
            if self.chance(0.6):
                c.execute(
                    "select postbus.set_key_policy('late', concurrency => %s)", [self.rnd.choice([1, 2])]
                )
            else:
                c.execute("select postbus.unset_key_policy('late')")

    def _options(self, c: Connection) -> None:
        queue = self.rnd.choice(self.queues)
        verb = self.rnd.choice(["alter", "pause", "archive"])
        if verb == "alter":
            options = json.dumps(
                {"backoff": self.rnd.choice([0.01, 0.03]), "ageing": self.rnd.choice([0, 0.1, None])}
            )
            c.execute("select postbus.alter_queue(%s, %s)", [queue, options])
        elif verb == "pause":
            c.execute("select postbus.pause(%s)", [queue])
            c.execute("commit")
            self.pause(0.05)
            c.execute("begin")
            c.execute("select postbus.resume(%s)", [queue])
        elif queue in ("plain", "late"):
            c.execute(
                "select postbus.alter_queue(%s, %s)",
                [queue, Jsonb({"on_ack": self.rnd.choice(["delete", "archive"])})],
            )
