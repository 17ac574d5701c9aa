"""The two systems as their users call them: the documented calls, nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from bench._database import Connection

# About 100 bytes, and the same for both.
PAYLOAD = (
    '{"order": 1234567, "customer": "c-4711", "status": "shipped", "total": 99.95, "note": "leave at door"}'
)
# About 1,000 bytes.
LARGE = json.dumps(
    {
        **json.loads(PAYLOAD),
        "lines": [
            {"sku": f"a-{7919 * i % 1000:03}-{i}", "name": f"article {i}", "count": i, "price": 9.95 + i}
            for i in range(13)
        ],
    }
)


def create_stream(conn: Connection, name: str) -> None:
    """Create a stream and let maintenance see it, as a server that is in use does within a second or two."""
    conn.execute("select postbus.create_stream(%s)", [name])
    for _ in range(3):
        conn.execute("select * from postbus.maintain()")


@dataclass(frozen=True)
class Page:
    """What one read returned: the payloads, and what finishes it."""

    payloads: list[bytes]
    receipt: bytes


class Reader(Protocol):
    """One consumer. Results come as text and are not decoded further, for both systems alike."""

    def read(self, limit: int) -> Page:
        """Take the next messages, in a transaction of its own."""

    def finish(self, page: Page) -> None:
        """Be done with them, in a transaction of its own."""


def call(pgconn: PGconn, name: bytes, params: list[bytes]) -> PGresult:
    """Run a prepared statement; an error is an exception."""
    result = pgconn.exec_prepared(name, params)
    if result.status != ExecStatus.TUPLES_OK:
        raise RuntimeError(result.get_error_message())
    return result


def prepare(pgconn: PGconn, name: bytes, statement: bytes) -> dict[bytes, int]:
    """Prepare a statement; returns the places of its columns."""
    if pgconn.prepare(name, statement).status != ExecStatus.COMMAND_OK:
        raise RuntimeError(pgconn.get_error_message())
    described = pgconn.describe_prepared(name)
    return {described.fname(i) or b"": i for i in range(described.nfields)}


def column(result: PGresult, place: int) -> list[bytes]:
    """One column of a result."""
    return [result.get_value(row, place) or b"" for row in range(result.ntuples)]


class Pgmq:
    """pgmq.read and pgmq.delete."""

    def __init__(self, conn: Connection, queue: str) -> None:
        self._pgconn = conn.pgconn
        self._queue = queue.encode()
        self._read, self._finish = b"read_" + self._queue, b"finish_" + self._queue
        places = prepare(self._pgconn, self._read, b"select * from pgmq.read($1, $2, $3)")
        prepare(self._pgconn, self._finish, b"select * from pgmq.delete($1, $2::bigint[])")
        self._id, self._payload = places[b"msg_id"], places[b"message"]

    def read(self, limit: int) -> Page:
        """Read with a visibility timeout of 30 s, the lease that a group has too."""
        result = call(self._pgconn, self._read, [self._queue, b"30", b"%d" % limit])
        return Page(column(result, self._payload), b"{%s}" % b",".join(column(result, self._id)))

    def finish(self, page: Page) -> None:
        """Delete the messages by their ids."""
        call(self._pgconn, self._finish, [self._queue, page.receipt])


class Postbus:
    """postbus.consume and postbus.ack."""

    def __init__(self, conn: Connection, stream: str, group: str) -> None:
        self._pgconn = conn.pgconn
        self._stream, self._group = stream.encode(), group.encode()
        name = self._stream + b"_" + self._group
        self._read, self._finish = b"read_" + name, b"finish_" + name
        places = prepare(self._pgconn, self._read, b"select * from postbus.consume($1, $2, $3)")
        prepare(self._pgconn, self._finish, b"select postbus.ack($1::text)")
        self._batch, self._payload = places[b"batch"], places[b"payload"]

    def read(self, limit: int) -> Page:
        """Consume a page on the group's lease."""
        result = call(self._pgconn, self._read, [self._stream, self._group, b"%d" % limit])
        receipt = result.get_value(0, self._batch) or b"" if result.ntuples else b""
        return Page(column(result, self._payload), receipt)

    def finish(self, page: Page) -> None:
        """Acknowledge the batch."""
        call(self._pgconn, self._finish, [page.receipt])


class Queue:
    """postbus.receive and postbus.ack, on a queue."""

    def __init__(self, conn: Connection, queue: str) -> None:
        self._pgconn = conn.pgconn
        self._queue = queue.encode()
        self._read, self._finish = b"receive_" + self._queue, b"ack_" + self._queue
        places = prepare(self._pgconn, self._read, b"select * from postbus.receive($1, $2)")
        prepare(self._pgconn, self._finish, b"select postbus.ack($1::text[])")
        self._receipt, self._payload = places[b"receipt"], places[b"payload"]

    def read(self, limit: int) -> Page:
        """Receive on the queue's lease, which is 30 s."""
        result = call(self._pgconn, self._read, [self._queue, b"%d" % limit])
        return Page(column(result, self._payload), b"{%s}" % b",".join(column(result, self._receipt)))

    def finish(self, page: Page) -> None:
        """Acknowledge the messages by their receipts."""
        call(self._pgconn, self._finish, [page.receipt])
