"""Queues themselves: made, changed, listed, paused, emptied, dropped, and what is refused."""

from __future__ import annotations

from typing import Any

from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told

DEFAULTS: dict[str, Any] = {
    "lease": "00:00:30", "max_attempts": 5, "backoff": "00:00:01", "max_backoff": "01:00:00",
    "on_ack": "delete",
    "archive_retain": "7 days", "priorities": True, "ageing": "00:01:00", "max_size": None,
    "keep_expired": False,
    "dedupe_window": "01:00:00", "notify": True, "unlogged_unsafe": False,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "lease": "00:00:05", "max_attempts": 2, "backoff": "00:00:00", "max_backoff": "00:10:00",
    "on_ack": "archive",
    "archive_retain": "1 day", "priorities": False, "ageing": None, "max_size": 10, "keep_expired": True,
    "dedupe_window": "00:00:10", "notify": False,
}  # fmt: skip


def options(s: Desk, of: str = "q") -> dict[str, Any]:
    return {k: v for k, v in s.look(of).items() if k in DEFAULTS}


def test_create_with_and_without_options(s: Desk) -> None:
    s.queue()
    s.queue("all", unlogged_unsafe=True, **OTHERS)
    assert options(s) == DEFAULTS
    assert options(s, "all") == {**OTHERS, "unlogged_unsafe": True}


def test_alter_changes_what_is_named_and_nothing_else(s: Desk) -> None:
    s.queue()
    s.queue("other")
    for option, value in OTHERS.items():
        s.alter_queue(**{option: value})
        assert options(s)[option] == value
    assert options(s) == {**OTHERS, "unlogged_unsafe": False}
    s.alter_queue(max_size=None, ageing=30)
    assert options(s) == {**OTHERS, "unlogged_unsafe": False, "max_size": None, "ageing": "00:00:30"}
    assert options(s, "other") == DEFAULTS


def test_unlogged_is_fixed_at_creation(s: Desk) -> None:
    s.queue()
    s.queue("u", unlogged_unsafe=True)
    s.alter_queue(unlogged_unsafe=False)
    s.alter_queue("u", unlogged_unsafe=True)
    with refused("PB003", "queue 'q': unlogged_unsafe is fixed"):
        s.alter_queue(unlogged_unsafe=True)
    with refused("PB003", "queue 'u': unlogged_unsafe is fixed"):
        s.alter_queue("u", unlogged_unsafe=False)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"leese": 5}, "unknown queue option 'leese'"),
    ({"lease": 0}, "lease must be longer than zero"),
    ({"lease": None}, "lease must be longer than zero"),
    ({"lease": "soon"}, "option 'lease' is not an interval: soon"),
    ({"lease": -1}, "option 'lease' must be from 0"),
    ({"backoff": None}, "backoff"),
    ({"max_backoff": [1]}, "option 'max_backoff' is not an interval"),
    ({"archive_retain": None}, "archive_retain"),
    ({"dedupe_window": None}, "dedupe_window"),
    ({"ageing": "-1 minute"}, "option 'ageing'"),
    ({"max_attempts": 0}, "option 'max_attempts' must be a whole number from 1"),
    ({"max_attempts": None}, "option 'max_attempts'"),
    ({"max_size": 0}, "option 'max_size'"),
    ({"max_size": "many"}, "option 'max_size'"),
    ({"priorities": "yes"}, "option 'priorities' must be true or false"),
    ({"keep_expired": 1}, "option 'keep_expired' must be true or false"),
    ({"notify": None}, "option 'notify' must be true or false"),
    ({"on_ack": "burn"}, 'on_ack must be "delete" or "archive", not "burn"'),
    ({"on_ack": None}, "on_ack must be"),
]


def test_bad_options_are_refused_by_create_and_alter(one: Desk) -> None:
    for given, saying in BAD:
        with refused("PB003", saying):
            one.queue("r", **given)
        with refused("PB003", saying):
            one.alter_queue(**given)
    assert options(one) == DEFAULTS
    assert one.value("select count(*) from postbus.list_queues()") == 1


def test_options_must_be_an_object(one: Desk) -> None:
    for wrong in ["null", "[]", '"lease"', "3"]:
        with refused("PB003", "queue options must be a JSON object"):
            one.rows("select postbus.create_queue('r', %s::jsonb)", wrong)
        with refused("PB003", "queue options must be a JSON object"):
            one.rows("select postbus.alter_queue('q', %s::jsonb)", wrong)


def test_bad_names(s: Desk) -> None:
    for name in ["", "1st", "with space", "é", "x" * 56, "a/b", None]:
        with refused("PB003", "bad queue name"):
            s.rows("select postbus.create_queue(%s)", name)
    s.queue("x" * 55)


def test_names_that_are_taken(s: Desk) -> None:
    """Streams and queues are one name space."""
    s.queue()
    s.stream("s")
    for create in ["create_queue", "create_stream"]:
        with refused("PB002", "queue 'q' already exists"):
            s.rows(f"select postbus.{create}('q')")
        with refused("PB002", "stream 's' already exists"):
            s.rows(f"select postbus.{create}('s')")


def test_two_creators_of_one_name(bus: Office, s: Desk) -> None:
    second = bus.session()
    s.begin().queue()

    def create() -> None:
        with refused("PB002", "queue 'q' already exists"):
            second.queue()

    with bus.blocked(second, create) as done:
        s.commit()
    assert done.result() is None


CALLS = [
    "alter_queue('no', '{}')",
    "drop_queue('no')",
    "purge_queue('no')",
    "send('no', 'x')",
    "send('no', 'x', priority => 3)",
    "send_batch('no', array['x'])",
    "receive('no')",
    "pop('no')",
    "peek('no')",
    "cancel('no', 1)",
    "cancel('no', array[1::bigint])",
    "next_due('no')",
    "archived('no')",
    "set_key_policy('no', concurrency => 1)",
    "unset_key_policy('no')",
    "bind('no')",
    "unbind('no')",
    "pause('no')",
    "resume('no')",
    "dead_letters('no')",
    "redrive('no')",
    "purge_dead_letters('no')",
]


def test_a_queue_that_is_not_there(s: Desk) -> None:
    for call in CALLS:
        with refused("PB001", "queue 'no' does not exist"):
            s.rows(f"select postbus.{call}")


def test_a_stream_is_no_queue_and_the_hint_says_so(s: Desk) -> None:
    s.stream()
    with refused("PB001", "'s' is a stream"):
        s.send("x", to="s")
    with refused("PB001", "'s' is a stream"):
        s.receive(of="s")


def test_a_queue_is_no_stream(one: Desk) -> None:
    with refused("PB001", "'q'"):
        one.publish("x", to="q")
    with refused("PB003", "'q' is a queue: it has no groups"):
        one.rows("select postbus.pause('q', 'g')")


def test_pause_and_resume(either: Desk) -> None:
    either.send_many(3)
    out = either.receive(1)
    either.rows("select postbus.pause('q')")
    assert either.look()["paused"] is True
    assert either.receive() == []
    assert either.pop() == []
    either.send("while paused")
    assert either.ack(out[0].receipt) == 1
    either.rows("select postbus.resume('q')")
    assert either.look()["paused"] is False
    assert either.drain() == ["m2", "m3", "while paused"]


def test_list_counts_by_state(bus: Office, either: Desk) -> None:
    assert either.sizes() == (0, 0, 0)
    assert either.look()["oldest_age"] is None
    either.send_many(4)
    either.send("later", delay="1 hour")
    bus.wait(7)
    either.receive(1)
    dead = either.receive(1)
    either.give_up(dead[0].receipt)
    row = either.look()
    assert (row["ready"], row["delayed"], row["in_flight"], row["dead_letters"]) == (2, 1, 1, 1)
    assert row["oldest_age"] == "00:00:07"
    bus.wait(31)
    assert either.sizes() == (3, 1, 0)


def test_list_counts_only_so_far(one: Desk) -> None:
    one.send_many(20)
    assert one.value("select ready from postbus.list_queues(5)") == 5


def test_purge_removes_everything_and_fences_receipts(either: Desk) -> None:
    either.queue("other")
    either.send("stays", to="other")
    either.send_many(5)
    either.send("later", delay="1 day", priority=4)
    out = either.receive(2)
    assert either.value("select postbus.purge_queue('q')") == 6
    assert either.sizes() == (0, 0, 0)
    with refused("PB004"):
        either.ack(out[0].receipt)
    either.send("new")
    assert either.drain() == ["new"]
    assert either.drain(of="other") == ["stays"]


def test_purge_keeps_dead_letters(one: Desk) -> None:
    one.send("dead")
    one.give_up(one.receive()[0].receipt)
    assert one.value("select postbus.purge_queue('q')") == 0
    assert one.letters() == [("dead", 1, "given up")]


def test_purge_frees_the_keys(one: Desk) -> None:
    """The place of a purged message does not stay taken until its lease would have ended."""
    one.policy(concurrency=1)
    one.send("old", "k")
    one.receive()
    one.rows("select postbus.purge_queue('q')")
    one.send("new", "k")
    assert told(one.receive()) == ["new"]


def test_drop_wants_an_empty_queue(either: Desk) -> None:
    either.send("x")
    either.receive()
    with refused("PB003", "queue 'q' still holds messages"):
        either.rows("select postbus.drop_queue('q')")
    either.rows("select postbus.drop_queue('q', force => true)")
    with refused("PB001", "queue 'q' does not exist"):
        either.receive()


def test_drop_leaves_nothing_behind(bus: Office, s: Desk) -> None:
    s.stream()
    s.queue("other")
    s.queue(on_ack="archive")
    s.policy(concurrency=1)
    s.policy("k", rate=5)
    for binding in ["'q', 'a.#'", "'q', stream => 's'"]:
        s.rows(f"select postbus.bind({binding})")
    for i in range(4):
        s.send(f"m{i}", f"k{i}", dedupe_key=f"d{i}", ttl="1 hour")
    page = s.receive(3)
    s.give_up(page[0].receipt)
    s.ack(page[1].receipt)
    number = s.value("select id from postbus.queue where name = 'q'")
    s.rows("select postbus.drop_queue('q', true)")
    tables = [
        "queued",
        "queued_unlogged",
        "key_policy",
        "key_state",
        "key_wake",
        "mark",
        "tally",
        "dead_letter",
    ]
    for table in [*tables, "binding"]:
        assert s.value(f"select count(*) from postbus.{table} where queue_id = %s", number) == 0, table
    assert s.value("select count(*) from postbus.dedupe") == 0
    s.maintain()
    assert s.value("select to_regclass(%s)", f"postbus.register_{number}") is None
    # A new queue of that name is another one.
    s.queue()
    s.publish("x", type="a")
    assert s.drain() == []
    assert s.rows("select * from postbus.archived('q')") == []


def test_two_drops_at_once(bus: Office, one: Desk) -> None:
    second = bus.session()
    one.begin().rows("select postbus.drop_queue('q')")

    def drop() -> None:
        with refused("PB001", "queue 'q' does not exist"):
            second.rows("select postbus.drop_queue('q')")

    with bus.blocked(second, drop) as done:
        one.commit()
    assert done.result() is None
    one.maintain()  # reports problems, such as a register that is not there


def test_create_rolled_back(s: Desk) -> None:
    s.begin().queue()
    s.send("x")
    assert told(s.receive()) == ["x"]
    s.rollback()
    assert s.rows("select * from postbus.list_queues()") == []
    s.queue()
    assert s.receive() == []
