"""Topics: one send or publish reaches every queue that is bound to it, once, in the sender's transaction."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Database
from tests.engine.bus import refused
from tests.queue.work import Desk, Office, told


def bind(s: Desk, queue: str, pattern: str = "#", stream: str | None = None) -> None:
    s.rows("select postbus.bind(%s, %s, %s)", queue, pattern, stream)


def unbind(s: Desk, queue: str, pattern: str = "#", stream: str | None = None) -> None:
    s.rows("select postbus.unbind(%s, %s, %s)", queue, pattern, stream)


def topic(s: Desk, name: str, payload: str = "x") -> list[str]:
    """The queues it went to."""
    return [r[0] for r in s.rows("select queue from postbus.send_topic(%s, %s::text)", name, payload)]


@pytest.fixture
def two(s: Desk) -> Desk:
    s.queue("a")
    s.queue("b", unlogged_unsafe=True)
    return s


def test_bind_list_unbind(two: Desk) -> None:
    two.stream()
    bind(two, "b", "x.*")
    bind(two, "a", stream="s")
    bind(two, "a", "y.#")
    bind(two, "a", "y.#")  # again is nothing new
    assert two.rows("select * from postbus.list_bindings()") == [
        ("a", None, "y.#"), ("a", "s", "#"), ("b", None, "x.*"),
    ]  # fmt: skip
    unbind(two, "a", "y.#")
    unbind(two, "a", stream="s")
    assert two.rows("select * from postbus.list_bindings()") == [("b", None, "x.*")]
    with refused("PB001", "queue 'a' is not bound to topic 'y.#'"):
        unbind(two, "a", "y.#")
    with refused("PB001", "queue 'a' is not bound to stream s with pattern '#'"):
        unbind(two, "a", stream="s")
    for call in [bind, unbind]:
        with refused("PB001", "stream 'no' does not exist"):
            call(two, "a", stream="no")


def test_bad_patterns_and_topics(two: Desk) -> None:
    for pattern in ["", ".", "a.", ".a", "a..b", "a*", "*a", "a.b#", "##", "**", None]:
        with refused("PB003", "bad pattern"):
            two.rows("select postbus.bind('a', %s)", pattern)
    for name in ["", ".", "a.", ".a", "a..b", "a.*", "#", None]:
        with refused("PB003", "bad topic"):
            two.rows("select * from postbus.send_topic(%s, 'x')", name)


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("orders", ["orders"], ["order", "orders.x", "x.orders", "Orders"]),
        ("orders.*", ["orders.x", "orders.x y"], ["orders", "orders.x.y", "x.orders.y"]),
        ("orders.#", ["orders", "orders.x", "orders.x.y"], ["ordersx", "x.orders"]),
        ("#.failed", ["failed", "a.failed", "a.b.failed"], ["failed.a", "afailed"]),
        ("*.*", ["a.b"], ["a", "a.b.c"]),
        ("#", ["a", "a.b", "a.b.c"], []),
        ("*.#", ["a", "a.b", "a.b.c"], []),
        ("a.#.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "z", "a.z.b"]),
        ("a.*.#.z", ["a.b.z", "a.b.c.z"], ["a.z"]),
        ("a+b.(c)", ["a+b.(c)"], ["aab.c", "ab.(c)"]),
        ("a|b", ["a|b"], ["a", "b"]),
        ("x\\d", ["x\\d"], ["x1"]),
        ("[ab]^$?{1}", ["[ab]^$?{1}"], ["a"]),
    ],
)
def test_patterns(one: Desk, pattern: str, fits: list[str], fits_not: list[str]) -> None:
    bind(one, "q", pattern)
    for name in fits:
        assert topic(one, name) == ["q"], name
    for name in fits_not:
        assert topic(one, name) == [], name
    assert len(one.drain()) == len(fits)


def test_a_topic_message_is_a_message(bus: Office, two: Desk) -> None:
    bind(two, "a", "o.*")
    bind(two, "b", "o.#")
    sent = two.rows(
        "select * from postbus.send_topic('o.new', '{\"n\":  1}'::jsonb, 'k', '{\"h\": 1}',"
        " priority => 2, delay => '5 s')"
    )
    two.rows("select postbus.send_topic('o.new', '\\x00ff'::bytea)")
    assert [q for q, _ in sent] == ["a", "b"]
    assert [told(two.receive(of=q)) for q in "ab"] == [[None], [None]]
    bus.wait(5)
    for name, number in sent:
        (m,) = two.receive(of=name)
        assert (m.id, m.payload, m.type, m.key, m.headers, m.priority) == (
            number, '{"n": 1}', "o.new", "k", {"h": 1}, 2,
        )  # fmt: skip
    assert topic(two, "nobody.listens") == []
    with refused("PB003", "needs a payload"):
        two.rows("select postbus.send_topic('o.new', null::text)")


def test_once_however_many_patterns_fit(two: Desk) -> None:
    for pattern in ["#", "x", "x.#", "*"]:
        bind(two, "a", pattern)
    bind(two, "b", "*")
    assert topic(two, "x") == ["a", "b"]
    assert [two.drain(of=q) for q in "ab"] == [["x"], ["x"]]


def test_all_of_it_or_nothing(two: Desk) -> None:
    two.alter_queue("b", max_size=1)
    bind(two, "a")
    bind(two, "b")
    two.begin()
    topic(two, "t")
    two.rollback()
    assert two.receive(of="a") == two.receive(of="b") == []
    topic(two, "t", "fits")
    with refused("PB006", "queue 'b' is full"):
        topic(two, "t", "does not")
    assert [two.drain(of=q) for q in "ab"] == [["fits"], ["fits"]]


def test_unbound_and_dropped_queues_get_no_more(two: Desk) -> None:
    for q in "ab":
        bind(two, q)
    unbind(two, "a")
    two.rows("select postbus.drop_queue('b')")
    assert topic(two, "t") == []
    two.queue("b")
    assert topic(two, "t") == []


# Streams.


@pytest.fixture
def bound(two: Desk) -> Desk:
    """Queue a has all of stream s, queue b its orders."""
    two.stream()
    two.group()
    bind(two, "a", stream="s")
    bind(two, "b", "orders.*", stream="s")
    return two


def test_publish_reaches_the_queues(bound: Desk) -> None:
    bound.publish("1", "k", type="orders.new", headers='{"h": 1}')
    bound.publish("2", type="users.new")
    bound.rows("select postbus.publish('s', %s, 'orders.json')", Jsonb({"n": 3}))
    bound.rows("select postbus.publish('s', '\\x00ff'::bytea, 'orders.bytes')")
    bound.publish("5")
    a, b = bound.receive(of="a"), bound.receive(of="b")
    assert told(a) == ["1", "2", '{"n": 3}', None, "5"]
    assert [m.type for m in b] == ["orders.new", "orders.json", "orders.bytes"]
    assert (b[0].key, b[0].headers, b[2].blob) == ("k", {"h": 1}, b"\x00\xff")
    # The stream has it all as before.
    assert bound.take() == told(a)


def test_publish_batch_keeps_its_order(bound: Desk) -> None:
    bound.rows(
        "select postbus.publish_batch('s', array['1', '2', '3', '4'],"
        " types => array['orders.a', 'x', 'orders.b', 'orders.a'],"
        " keys => array['k', null, 'l', 'k'], headers => array[null, '1', null, '2']::jsonb[])"
    )
    bound.rows("select postbus.publish_batch('s', array['\\x05'::bytea])")
    bound.fill(2)
    a, b = bound.receive(of="a"), bound.receive(of="b")
    assert told(a) == ["1", "2", "3", "4", None, "e1", "e2"]
    assert [(m.payload, m.type, m.key, m.headers) for m in b] == [
        ("1", "orders.a", "k", None), ("3", "orders.b", "l", None), ("4", "orders.a", "k", 2),
    ]  # fmt: skip


def test_publish_rolled_back(bound: Desk) -> None:
    bound.begin().publish("1", type="orders.new")
    bound.fill(2)
    bound.rollback()
    assert bound.receive(of="a") == bound.receive(of="b") == []
    assert bound.take() == []


@pytest.mark.parametrize("mover", ["maintain", "consume"])
def test_deliver_at(bus: Office, bound: Desk, mover: str) -> None:
    """When its time has come and somebody moves it into the stream, it comes to the queues as well."""
    bound.publish("later", "k", type="orders.new", deliver_at=bus.now + timedelta(seconds=10))
    assert bound.receive(of="a") == []
    bus.wait(10)
    assert bound.maintain() if mover == "maintain" else bound.take()
    assert [(m.payload, m.type, m.key) for m in bound.receive(of="b")] == [("later", "orders.new", "k")]
    assert told(bound.receive(of="a")) == ["later"]
    bus.wait(1)
    bound.maintain()
    assert bound.receive(of="a") == []


def test_dedupe_goes_for_the_queues_too(bound: Desk) -> None:
    for _ in range(2):
        bound.publish("once", dedupe_key="d")
    assert bound.drain(of="a") == ["once"]


def test_every_type_fits_the_default_pattern(bound: Desk) -> None:
    """Types are any text, also with empty words; a queue bound to all of a stream gets all of it."""
    types = ["default", "a.b", "", ".", "a..b", "a.", ".a", "with space", "new\nline", "*", "#"]
    for kind in types:
        bound.publish("x", type=kind)
    assert [m.type for m in bound.receive(of="a")] == types


def test_several_patterns_and_streams(bound: Desk) -> None:
    bound.stream("t")
    bind(bound, "a", "orders.*", stream="s")
    bind(bound, "a", stream="t")
    bound.publish("s1", type="orders.new")
    bound.publish("t1", to="t")
    assert bound.drain(of="a") == ["s1", "t1"]
    assert topic(bound, "orders.new") == []  # bound to streams, not to topics


def test_unbound_from_a_stream(bound: Desk) -> None:
    unbind(bound, "a", stream="s")
    bound.publish("1", type="orders.new")
    unbind(bound, "b", "orders.*", stream="s")
    bound.publish("2", type="orders.new")
    assert (bound.drain(of="a"), bound.drain(of="b")) == ([], ["1"])
    assert bound.take() == ["1", "2"]


def test_stream_and_queue_dropped(bound: Desk) -> None:
    bound.rows("select postbus.drop_queue('a')")
    bound.publish("1", type="orders.new")
    assert bound.drain(of="b") == ["1"]
    bound.rows("select postbus.drop_stream('s', true)")
    assert bound.rows("select * from postbus.list_bindings()") == []
    bound.stream()
    bound.publish("2", type="orders.new")
    assert bound.drain(of="b") == []


def test_keys_of_the_stream_are_keys_of_the_queue(s: Desk) -> None:
    s.stream(lanes=4)
    s.queue()
    s.policy(concurrency=1)
    bind(s, "q", stream="s")
    for i in range(6):
        s.publish(f"m{i}", "ab"[i % 2])
    got: dict[str | None, list[str | None]] = {}
    while page := s.receive():
        assert len(page) == len({m.key for m in page})
        for m in page:
            got.setdefault(m.key, []).append(m.payload)
        s.ack(*[m.receipt for m in page])
    assert got == {"a": ["m0", "m2", "m4"], "b": ["m1", "m3", "m5"]}


def test_captured_tables(db: Database) -> None:
    """Insert, update, delete and truncate of a captured table come to the queues bound to its stream."""
    s = Office(db).session()
    s.stream()
    s.queue("all")
    s.queue("deletes")
    bind(s, "all", stream="s")
    bind(s, "deletes", "delete", stream="s")
    s.rows("create table public.orders (id int primary key, n int)")
    s.rows("select postbus.capture('public.orders', 's')")
    s.rows("insert into public.orders select i, i from generate_series(1, 3) i")
    s.rows("update public.orders set n = 0 where id <= 2")
    s.rows("delete from public.orders where id = 3")
    s.begin().rows("delete from public.orders")
    s.rollback()
    s.rows("truncate public.orders")
    page = s.receive(of="all")
    events = [json.loads(str(m.payload)) for m in page]
    assert [e["op"] for e in events] == ["insert"] * 3 + ["update"] * 2 + ["delete", "truncate"]
    assert [m.type for m in page] == [e["op"] for e in events]
    assert [e["after"]["id"] for e in events[:3]] == [1, 2, 3]
    assert len({m.key for m in page[:3]}) == 3
    assert [m.type for m in s.receive(of="deletes")] == ["delete"]
