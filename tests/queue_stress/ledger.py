"""The log of a run. It is in the database, and each line is written in the transaction of what it tells.

So it cannot disagree with what was committed, whatever was killed. All times are the database's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

SETUP = """
create view message as select * from postbus.queued union all select * from postbus.queued_unlogged;
create table sent (
  id bigint primary key, queue text not null, uid text not null, tx text not null, key text,
  priority int not null, due timestamptz not null, expires_at timestamptz, dedupe text);
create table delivered (
  n bigint generated always as identity, queue text not null, id bigint not null, claim int not null,
  attempt int not null, key text, worker text not null, asked timestamptz not null, at timestamptz not null,
  got timestamptz not null, due timestamptz not null);
create table ended (
  n bigint generated always as identity, queue text not null, id bigint not null, claim int not null,
  what text not null, began timestamptz not null, done timestamptz not null, due timestamptz);
create table died (queue text not null, id bigint not null, claim int not null, at timestamptz not null);
create table fault (text text not null);
"""

# What can be done to a message that was received, or that waits (CANCEL).
ACK = "ack"
NACK = "nack"
EXTEND = "extend"
DEAD = "dead"
POP = "pop"
CANCEL = "cancel"
LAST = (ACK, POP, CANCEL)

SENT = """
insert into sent
select m.id, %(queue)s, coalesce(m.payload, ''), %(tx)s, m.key, m.priority, m.due, m.expires_at, %(dedupe)s
from message m where m.id = any (%(ids)s) on conflict (id) do nothing
"""
RECEIVE = """
select statement_timestamp(), r.id, r.receipt, r.attempt
from postbus.receive(%(queue)s, %(max)s, %(lease)s::interval, %(worker)s, %(type)s) r
"""
# What the engine has written: a lease is a due time. So the time of the claim is known to the microsecond.
DELIVERED = """
insert into delivered (queue, id, claim, attempt, key, worker, asked, at, got, due)
select %(queue)s, m.id, m.claim, m.attempt, m.key, m.worker, %(asked)s, m.due - %(lease)s::interval,
  clock_timestamp(), m.due
from message m where m.id = any (%(ids)s)
returning id, claim, attempt, due
"""
ENDED = """
insert into ended (queue, id, claim, what, began, done, due)
select %(queue)s, x.id, x.claim, %(what)s, %(began)s, clock_timestamp(), m.due
from unnest(%(ids)s::bigint[], %(claims)s::int[]) x (id, claim) left join message m on m.id = x.id
"""
REDRIVE = """
with d as materialized (
  select d.id, d.event_id, d.claim, d.died_at
  from postbus.dead_letter d join postbus.queue q on q.id = d.queue_id
  where q.name = %(queue)s and d.reason <> 'expired' for update of d skip locked),
  l as (insert into died select %(queue)s, d.event_id, d.claim, d.died_at from d)
select postbus.redrive(%(queue)s, array_agg(d.id)) from d having count(*) > 0
"""


@dataclass(frozen=True)
class Got:
    """One message as a worker holds it."""

    id: int
    claim: int
    receipt: str
    due: Any


def claim_of(receipt: str) -> int:
    return int(receipt.split(":")[1])


def receive(
    c: Connection, queue: str, worker: str, size: int, lease: float, type: str | None = None
) -> list[Got]:
    """Receive, and write it down. In the caller's transaction."""
    args: dict[str, Any] = {
        "queue": queue,
        "worker": worker,
        "max": size,
        "lease": f"{lease} s",
        "type": type,
    }
    rows = c.execute(RECEIVE, args).fetchall()
    if not rows:
        return []
    args |= {"asked": rows[0][0], "ids": [r[1] for r in rows]}
    written = {r[0]: r for r in c.execute(DELIVERED, args).fetchall()}
    if len(rows) > size or len(written) != len(rows):
        raise AssertionError(f"asked for {size}, got {rows}, of which there are {written}")
    out = []
    for _, id_, receipt, attempt in rows:
        claim = claim_of(receipt)
        if written[id_][1:3] != (claim, attempt):
            raise AssertionError(f"{receipt} attempt {attempt} is {written[id_]}")
        out.append(Got(id_, claim, receipt, written[id_][3]))
    return out


def note(c: Connection, queue: str, what: str, began: Any, rows: Sequence[tuple[int, int]]) -> None:
    """Write down what became of messages, given as (id, claim)."""
    args = {
        "queue": queue,
        "what": what,
        "began": began,
        "ids": [r[0] for r in rows],
        "claims": [r[1] for r in rows],
    }
    c.execute(ENDED, args)
