"""``postbus drain``: empty a queue by finishing or moving what is in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from postbus.cli._connect import Dsn, connect, rows, value
from postbus.cli._delivery import PAGE, waits
from postbus.cli._options import Queue
from postbus.cli._print import done, notes
from postbus.engine import Connection

# peek sorts the whole queue for every page.
_MOVE_PAGE = 5000
# One statement: whatever happens, a message is in one of the two queues. Runs of messages that are sent alike
# are sent together, one run after the other, so that their order stays.
_MOVE = """
with page as materialized (
  select p.*, row_number() over () as n from postbus.peek(%s, state => %s, max => %s) p),
mine as materialized (
  select unnest(postbus.cancel(%s, array(
    select id from page where expires_at is null or expires_at > postbus.now_() order by n))) as id),
message as (
  select page.*, blob is not null as raw, case when state = 'delayed' then due end as later
  from page join mine using (id)),
run as (
  select m.*, row_number() over (order by n)
    - row_number() over (partition by priority, later, expires_at, raw order by n) as run
  from message m),
batch as (
  select priority, later, raw,
    array_agg(payload order by n) as payloads, array_agg(blob order by n) as blobs,
    array_agg(type order by n) as types, array_agg(key order by n) as keys,
    array_agg(headers order by n) as headers,
    -- Some time must be left: what expires in this very moment expires there.
    case when expires_at is not null
      then greatest(expires_at - coalesce(later, postbus.now_()), interval '1 ms') end as ttl
  from run group by priority, later, expires_at, raw, run order by min(n) offset 0),
sent as (
  select case when raw
    then postbus.send_batch(%s, blobs, types, keys, headers, priority, deliver_at => later, ttl => ttl)
    else postbus.send_batch(%s, payloads, types, keys, headers, priority, deliver_at => later, ttl => ttl)
    end as ids
  from batch)
select coalesce(sum(cardinality(ids)), 0)::bigint as moved, (select count(*) from page) as seen from sent
"""


def drain(
    queue: Queue,
    *,
    to: Annotated[
        str | None, typer.Option(help="Move the messages to this queue.", show_default=False)
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Go on until the queue is empty: wait for what is delayed or out.")
    ] = False,
    dsn: Dsn = None,
) -> None:
    """Finish every message that is due, as if a worker had acked it; or move all that nobody works on.

    A move keeps type, key, payload, headers, priority, due time and expiry; ids are new and attempts begin
    again. What is out with workers is theirs.

    Example: postbus drain emails

    Example: postbus drain emails --to emails-later
    """
    if to == queue:
        raise typer.BadParameter("a queue cannot be drained into itself", param_hint="--to")
    count = 0
    with connect(dsn) as conn:
        if to is not None:
            # It must be there, also if there is nothing to move.
            value(conn, "select postbus.next_due(%s)", to)
        news = waits(conn, queue, queue=True)
        try:
            with _bar(queue, _left(conn, queue), moving=to is not None) as show:
                while True:
                    for page in _finished(conn, queue) if to is None else _moved(conn, queue, to):
                        count += page
                        show(count)
                    if not wait or not sum(_left(conn, queue).values()):
                        break
                    next(news)
        except BaseException:
            if count:
                print(f"postbus: {count} messages were drained before this", file=sys.stderr)
            raise
        left = {state: size for state, size in _left(conn, queue).items() if size}
    done(f"finished {count} of queue {queue}" if to is None else f"moved {count} of queue {queue} to {to}")
    if left:
        rest = ", ".join(f"{size} {state.replace('_', ' ')}" for state, size in left.items())
        notes().print(f"postbus: left in queue {queue}: {rest}", soft_wrap=True)


def _left(conn: Connection, queue: str) -> dict[str, int]:
    query = "select ready, delayed, in_flight from postbus.list_queues() where name = %s"
    return next(iter(rows(conn, query, queue)), {})


@contextmanager
def _bar(queue: str, left: dict[str, int], *, moving: bool) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = left.get("ready", 0) + (left.get("delayed", 0) if moving else 0)
    err = notes()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(f"draining {queue}", total=total)
        yield lambda count: progress.update(task, completed=count, total=max(total, count))


def _finished(conn: Connection, queue: str) -> Iterator[int]:
    while count := value(conn, "select count(*) from postbus.pop(%s, %s)", queue, PAGE):
        yield count


def _moved(conn: Connection, queue: str, to: str) -> Iterator[int]:
    for state in ("ready", "delayed"):
        stay, more = 0, True
        while more:
            size = _MOVE_PAGE + stay
            [page] = rows(conn, _MOVE, queue, state, size, queue, to, to)
            yield page["moved"]
            # What has expired, or was taken just now, is seen again.
            stay, more = page["seen"] - page["moved"], page["seen"] == size
