"""The statements of the client. Every parameter has a cast, so that any driver can send them."""

from __future__ import annotations

_SECONDS = "make_interval(secs => %s::float8)"

# What most sends are; the engine's shortest way.
SEND_PLAIN = "select postbus.send(%s::text, %s::{kind}, %s::text, %s::text, %s::jsonb)"
SEND = (
    "select postbus.send(%s::text, %s::{kind}, %s::text, %s::text, %s::jsonb, %s::int, "
    f"{_SECONDS}, %s::timestamptz, {_SECONDS}, %s::text)"
)
SEND_BATCH = (
    "select postbus.send_batch(%s::text, %s::{kind}[], %s::text[], %s::text[], %s::jsonb[], %s::int, "
    f"{_SECONDS}, %s::timestamptz, {_SECONDS})"
)
PUBLISH = (
    "select postbus.publish(%s::text, %s::{kind}, %s::text, %s::text, %s::jsonb, %s::timestamptz, %s::text)"
)
PUBLISH_PLAIN = "select postbus.publish(%s::text, %s::{kind}, %s::text, %s::text, %s::jsonb)"
PUBLISH_BATCH = "select postbus.publish_batch(%s::text, %s::{kind}[], %s::text[], %s::text[], %s::jsonb[])"

# A claim that a crash of the server undoes is a message that comes again: it need not wait for the disk. That
# is for queues only. In a stream the crash would undo the token too, and the next lease would get the same
# one: a late ack would then finish events that nobody has handled.
_LIGHTLY = "(select set_config('synchronous_commit', 'off', true) offset 0) as lightly"
_COLUMNS = "r.id, r.type, r.key, r.payload, r.blob, r.headers, r.created_at, r.attempt, r.receipt"
_WORK = f"select {_COLUMNS}, null::text, r.priority, r.state from"
_EVENT = f"select {_COLUMNS}, r.batch, 0, null::jsonb from"
_RECEIVE = f"postbus.receive(%s::text, %s::int, {_SECONDS}, %s::text, %s::text) r"
_CONSUME = f"postbus.consume(%s::text, %s::text, %s::int, {_SECONDS}, %s::text) r"
RECEIVE = f"{_WORK} {_LIGHTLY}, {_RECEIVE}"
CONSUME = f"{_EVENT} {_CONSUME}"
# In a transaction of the user's, whose commit is as durable as the user wants it.
RECEIVE_IN = f"{_WORK} {_RECEIVE}"
PEEK = (
    "select id, type, key, payload, blob, headers, created_at, attempt, priority, saved "
    "from postbus.peek(%s::text, %s::text, %s::int, %s::bigint, %s::text)"
)

ACK = "select postbus.ack(%s::text[])"
NACK = f"select postbus.nack(%s::text[], {_SECONDS}, %s::text, %s::jsonb)"
EXTEND = f"select postbus.extend(%s::text[], {_SECONDS}, %s::jsonb)"
DEAD_LETTER = "select postbus.dead_letter(%s::text[], %s::text)"
RELEASE = "select postbus.release(%s::text[])"
# After one of these, where it runs in the background: a transaction of the user's may have locked a message,
# and may itself be waiting for us.
SOON = " from (select set_config('lock_timeout', '200ms', true) offset 0) as soon"
KEEP = f"{EXTEND} from (select set_config('lock_timeout', '100ms', true) offset 0) as soon"

DEAD_LETTERS = (
    "select id, reason, died_at, type, key, payload, blob, headers, created_at, attempt, event_id "
    "from postbus.dead_letters(%s::text, %s::text, %s::int, %s::bigint)"
)
REDRIVE = "select postbus.redrive(%s::text, %s::text[]::bigint[], %s::text)"
SEEK = "select postbus.seek(%s::text, %s::text, %s::text)"
SEEK_TIME = "select postbus.seek(%s::text, %s::text, %s::text::timestamptz)"

DEFAULT_LEASE = "select extract(epoch from postbus.default_lease(%s::text, %s::text))::float8"
ORDERING = 'select ordering from postbus.list_groups() where stream = %s::text and "group" = %s::text'
EXISTS = {
    "queue": "select from postbus.list_queues() where name = %s::text",
    "stream": "select from postbus.list_streams() where name = %s::text",
    "group": ORDERING,
}
NEXT_DUE = "select extract(epoch from postbus.next_due(%s::text) - postbus.now_())::float8"


def kind(data: str | bytes) -> str:
    """The type of a payload column."""
    return "text" if isinstance(data, str) else "bytea"
