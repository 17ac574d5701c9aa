"""Queues of both systems for the benchmarks: made, filled, worked off and emptied in the same way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psycopg

from bench._database import Connection, Database
from bench._peers import PAYLOAD, Pgmq, Queue, Reader

SYSTEMS = ("pgmq", "postbus")
NAME = "bench"
_CHUNK = 1000

_CREATE = {"pgmq": "select pgmq.create(%s)", "postbus": "select postbus.create_queue(%s)"}
_FILL = {
    "pgmq": "pgmq.send_batch('{name}', array_fill('{payload}'::jsonb, array[{chunk}]))",
    "postbus": "postbus.send_batch('{name}', array_fill('{payload}'::text, array[{chunk}]))",
}
TABLES = {"pgmq": "pgmq.q_bench", "postbus": "postbus.queued"}
_SIZE = {
    "pgmq": "select count(*) from pgmq.q_bench",
    "postbus": "select count(*) from postbus.queued",
}

# One message: the row itself. Many: one row that has all receipts, and all payloads, which the client has to
# get too.
_TAKE = {
    ("pgmq", False): (
        "select msg_id as receipt, message from pgmq.read('{name}', 30, 1)",
        "select pgmq.delete('{name}', :receipt::bigint)",
    ),
    ("postbus", False): (
        "select receipt, payload from postbus.receive('{name}', 1)",
        "select postbus.ack(:receipt::text)",
    ),
    ("pgmq", True): (
        "select array_agg(msg_id) as receipt, string_agg(message::text, ' ') as payload"
        " from pgmq.read('{name}', 30, {batch})",
        "select * from pgmq.delete('{name}', :receipt::bigint[])",
    ),
    ("postbus", True): (
        "select array_agg(receipt) as receipt, string_agg(payload, ' ') as payload"
        " from postbus.receive('{name}', {batch})",
        "select postbus.ack(:receipt::text[])",
    ),
}


def create(conn: Connection, system: str, name: str = NAME) -> None:
    """Create a queue with the defaults of its system."""
    conn.execute(_CREATE[system].encode(), [name])


def reader(conn: Connection, system: str, name: str = NAME) -> Reader:
    """A consumer of a queue."""
    return Pgmq(conn, name) if system == "pgmq" else Queue(conn, name)


def fill(conn: Connection, system: str, count: int, payload: str = PAYLOAD, name: str = NAME) -> None:
    """Send so many messages, a thousand a transaction."""
    send = _FILL[system].format(name=name, payload=payload, chunk=_CHUNK)
    chunks = -(-count // _CHUNK)
    conn.execute(f"do $$ begin for i in 1 .. {chunks} loop perform {send}; commit; end loop; end $$".encode())


def size(conn: Connection, system: str) -> int:
    """How many messages there are."""
    row = conn.execute(_SIZE[system].encode()).fetchone()
    assert row is not None
    return int(row[0])


def clear(db: Database) -> None:
    """Begin a turn with empty tables, for both systems alike: what an earlier turn left is not measured."""
    with db.connect() as conn:
        conn.execute(f"truncate {', '.join(TABLES.values())}".encode())
        with suppress(psycopg.errors.InsufficientPrivilege):
            conn.execute("checkpoint")


@dataclass(frozen=True)
class Take:
    """Take a batch and finish it: two calls, two transactions, two round trips."""

    system: str
    batch: int

    def for_pgbench(self) -> str:
        """Both calls; the first leaves its receipts in a variable for the second."""
        take, finish = _TAKE[self.system, self.batch > 1]
        return f"{take} \\gset\n{finish};\n".format(name=NAME, batch=self.batch)

    def variables(self) -> dict[str, str]:
        """None."""
        return {}

    def turn(self, conn: Connection) -> Callable[[], None]:
        """The same with the calls of a client."""
        consumer = reader(conn, self.system)

        def take() -> None:
            consumer.finish(consumer.read(self.batch))

        return take
