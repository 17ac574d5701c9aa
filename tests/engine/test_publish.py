"""Publishing: what is stored, when it is delivered, and what a transaction that ends takes with it."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from tests.engine.bus import Bus, Session, refused


@pytest.fixture
def one(s: Session) -> Session:
    s.stream()
    s.group(ordering="stream")
    return s


# The envelope.


def test_text_is_verbatim(one: Session) -> None:
    texts = ['{"b": 1,  "a":2, "a":3}', "", " ", "not json", "\t\n\\ é 日本 🚌", "null", "x" * 300_000]
    for text in texts:
        one.publish(text)
    page = one.consume()
    assert [m.payload for m in page] == texts
    assert {(m.type, m.key, m.blob, m.headers, m.attempt) for m in page} == {("default", None, None, None, 1)}


def test_jsonb_is_canonical(one: Session) -> None:
    one.rows("select postbus.publish('s', %s)", Jsonb({"b": 1, "aa": [1, None, "é"]}))
    one.rows("select postbus.publish('s', '{\"a\":1,  \"a\":2}'::jsonb)")
    one.rows("select postbus.publish('s', 'null'::jsonb)")
    assert [m.payload for m in one.consume()] == ['{"b": 1, "aa": [1, null, "é"]}', '{"a": 2}', "null"]


def test_bytea_keeps_every_byte(one: Session) -> None:
    blobs = [b"\x00", bytes(range(256)), b""]
    for blob in blobs:
        one.rows("select postbus.publish('s', %s::bytea)", blob)
    page = one.consume()
    assert [m.blob for m in page] == blobs
    assert {m.payload for m in page} == {None}


def test_type_key_headers_and_time(bus: Bus, one: Session) -> None:
    bus.wait(12.5)
    one.publish("p", "key 'é", type="order.created", headers='{"trace": {"id": 1}, "n": null}')
    one.publish("p", "", type="")
    first, second = one.consume()
    assert (first.type, first.key, first.headers) == (
        "order.created",
        "key 'é",
        {"trace": {"id": 1}, "n": None},
    )
    assert first.created_at == bus.now
    assert (second.type, second.key) == ("", "")


@pytest.mark.parametrize("later", ["", ", deliver_at => 'infinity'", ", dedupe_key => 'd'"])
def test_payload_and_type_are_needed(one: Session, later: str) -> None:
    for payload in ["null::text", "null::jsonb", "null::bytea"]:
        with refused("PB003", "needs a payload"):
            one.rows(f"select postbus.publish('s', {payload}{later})")
    with refused("PB003", "type"):
        one.rows(f"select postbus.publish('s', 'p'::text, type => null{later})")
    assert one.rows("select * from postbus.dedupe") == []


def test_unknown_stream(one: Session) -> None:
    for name in ["x", "S", "", None]:
        with refused("PB001", "create_stream"):
            one.rows("select postbus.publish(%s, 'p'::text)", name)
        with refused("PB001", "create_stream"):
            one.rows("select postbus.publish_batch(%s, array['p'])", name)


# Batches.


def test_batch_of_each_type(one: Session) -> None:
    ids = one.value("select postbus.publish_batch('s', array['b', 'a'])")
    ids += one.value("select postbus.publish_batch('s', array['{\"b\":1}', '2']::jsonb[])")
    ids += one.value("select postbus.publish_batch('s', array['\\x00', '\\x01']::bytea[])")
    page = one.consume()
    assert [m.id for m in page] == ids == sorted(ids)
    assert [m.payload or m.blob for m in page] == ["b", "a", '{"b": 1}', "2", b"\x00", b"\x01"]


def test_batch_with_everything(one: Session) -> None:
    one.rows(
        "select postbus.publish_batch('s', array['1', '2', '3'], array['t', 'u', 'v'], array['k', null, 'm'],"
        " array['{\"h\": 1}', null, '[]']::jsonb[])"
    )
    assert [(m.payload, m.type, m.key, m.headers) for m in one.consume()] == [
        ("1", "t", "k", {"h": 1}),
        ("2", "u", None, None),
        ("3", "v", "m", []),
    ]


def test_bad_batches_publish_nothing(one: Session) -> None:
    bad = {
        "types => array['t']": "differ in length",
        "keys => array['a', 'b', 'c']": "differ in length",
        "headers => array['{}']::jsonb[]": "differ in length",
        "keys => '{}'": "differ in length",
        "types => array['t', null]": "null",
    }
    for arguments, saying in bad.items():
        with refused("PB003", saying):
            one.rows(f"select postbus.publish_batch('s', array['a', 'b'], {arguments})")
    for payloads in ["array['a', null]", "array['1', null]::jsonb[]", "array['\\x00', null]::bytea[]"]:
        with refused("PB003", "null"):
            one.rows(f"select postbus.publish_batch('s', {payloads})")
    assert one.consume() == []


def test_empty_batch(one: Session) -> None:
    assert one.value("select postbus.publish_batch('s', '{}'::text[])") == []
    assert one.value("select postbus.publish_batch('s', '{}'::jsonb[], '{}', '{}', '{}')") == []
    assert one.consume() == []


# Transactions.


def test_ids_go_up(bus: Bus, one: Session) -> None:
    sessions = [one, bus.session().begin(), bus.session().begin()]
    ids = [sessions[i % 3].publish("p") for i in range(9)]
    assert ids == sorted(set(ids))
    for s in sessions[1:]:
        s.commit()
    assert one.publish("p") > max(ids)


def test_rollback_leaves_nothing(bus: Bus, one: Session) -> None:
    a = bus.session().begin()
    a.publish("gone")
    a.publish("gone later", deliver_at=bus.now.replace(hour=1))
    a.publish("gone once", dedupe_key="d")
    a.rollback()
    bus.wait(7200)
    assert one.take() == []
    assert one.rows("select * from postbus.scheduled") == []
    assert one.rows("select * from postbus.dedupe") == []


def test_nobody_sees_an_open_transaction(bus: Bus, one: Session) -> None:
    a = bus.session().begin()
    a.publish("open")
    assert one.take() == []
    assert a.consume() == [], "not even itself: it may still roll back"
    a.commit()
    assert one.take() == ["open"]


def test_producers_do_not_wait_for_each_other(bus: Bus, one: Session) -> None:
    sessions = [bus.session().begin() for _ in range(4)]
    for i in range(12):
        sessions[i % 4].rows("set local lock_timeout = '1ms'")
        sessions[i % 4].publish(f"{i}", "same key")
    for s in reversed(sessions):
        s.commit()
    assert len(one.take()) == 12


# Later.


def test_deliver_at_by_consuming_alone(bus: Bus, one: Session) -> None:
    one.publish("later", "k", type="t", headers='{"h": 1}', deliver_at=bus.now.replace(minute=10))
    one.rows(
        "select postbus.publish('s', '\\x00'::bytea, deliver_at => %s)", bus.now.replace(minute=10, second=1)
    )
    one.publish("past", deliver_at=bus.now.replace(year=2020))
    assert one.take() == ["past"]
    assert one.value("select scheduled from postbus.list_streams()") == 2
    bus.wait(599)
    assert [one.consume() for _ in range(50)] == [[]] * 50
    bus.wait(2)
    got = [m for _ in range(3) for m in one.consume()]
    assert [(m.payload, m.blob, m.key, m.type, m.headers) for m in got] == [
        ("later", None, "k", "t", {"h": 1}),
        (None, b"\x00", None, "default", None),
    ]
    one.ack(got[0].batch)
    assert one.take() == []
    assert one.value("select scheduled from postbus.list_streams()") == 0


def test_deliver_at_beside_a_backlog(bus: Bus, one: Session) -> None:
    """A stream that always has work does not forget them."""
    one.publish("later", deliver_at=bus.now.replace(second=1))
    bus.wait(2)
    for _ in range(400):
        one.fill(1)
        page = one.consume(1)
        one.ack(page[0].batch)
        if one.value("select count(*) from postbus.scheduled") == 0:
            return
    pytest.fail("never moved")


def test_deliver_at_by_upkeep(bus: Bus, one: Session) -> None:
    for i in range(3):
        one.publish(f"{2 - i}", deliver_at=bus.now.replace(second=10 - i))
    bus.wait(8)
    assert one.maintain()["scheduled"] == 1
    bus.wait(5)
    assert one.maintain()["scheduled"] == 2
    assert one.take() == ["0", "1", "2"], "by time, not by when they were sent"


def test_scheduled_events_of_a_dropped_stream(bus: Bus, one: Session) -> None:
    """They go with it, and upkeep goes on."""
    one.publish("later", deliver_at=bus.now.replace(second=1))
    one.rows("select postbus.drop_stream('s', true)")
    bus.wait(2)
    one.maintain(3)
    assert one.rows("select * from postbus.scheduled") == []


# Once.


def test_dedupe_key_within_its_window(bus: Bus, s: Session) -> None:
    s.stream(dedupe_window="10 minutes")
    s.stream("t")
    s.group()
    first = s.publish("one", dedupe_key="d")
    assert s.publish("two", dedupe_key="d") == first
    assert s.publish("other", dedupe_key="e") != first
    s.publish("elsewhere", to="t", dedupe_key="d")
    assert s.value("select count(*) from postbus.log") == 3
    bus.wait(599)
    assert s.publish("three", dedupe_key="d") == first
    bus.wait(2)
    second = s.publish("four", dedupe_key="d")
    assert second > first
    assert s.publish("five", dedupe_key="d") == second
    assert s.take() == ["one", "other", "four"]


def test_dedupe_within_a_transaction_and_a_savepoint(one: Session) -> None:
    one.begin()
    one.rows("savepoint a")
    gone = one.publish("gone", dedupe_key="d")
    one.rows("rollback to savepoint a")
    first = one.publish("first", dedupe_key="d")
    assert first > gone
    assert one.publish("second", dedupe_key="d") == first
    one.commit()
    assert one.take() == ["first"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_producers_with_one_dedupe_key(bus: Bus, one: Session, end: str) -> None:
    """The second waits: it gets the first one's id, or is the publisher itself."""
    a, b = bus.session().begin(), bus.session()
    first = a.publish("a", dedupe_key="d")
    with bus.blocked(b, lambda: b.publish("b", dedupe_key="d")) as second:
        (a.commit if end == "commit" else a.rollback)()
    if end == "commit":
        assert second.result() == first
        assert one.take() == ["a"]
    else:
        assert second.result() > first
        assert one.take() == ["b"]


def test_dedupe_of_a_later_event(bus: Bus, one: Session) -> None:
    first = one.publish("later", dedupe_key="d", deliver_at=bus.now.replace(second=30))
    assert one.publish("now", dedupe_key="d") == first
    bus.wait(31)
    assert one.take() == ["later"]


def test_upkeep_forgets_old_dedupe_keys(bus: Bus, one: Session) -> None:
    one.publish("p", dedupe_key="d")
    bus.wait(3600 + 61)
    assert one.maintain()["dedupe"] == 1
    assert one.rows("select * from postbus.dedupe") == []


# Waking listeners.


def heard(s: Session, name: str = "s") -> list[str]:
    return [n.channel for n in s.conn.notifies(timeout=0.2) if n.channel == f"postbus.{name}"]


def test_notify_is_coalesced(bus: Bus, one: Session) -> None:
    listener = bus.session()
    listener.rows('listen "postbus.s"')
    one.rows(
        "do $$ begin for i in 1 .. 1000 loop"
        " perform postbus.publish('s', 'p'::text); commit; end loop; end $$"
    )
    count = len(heard(listener))
    assert 1 <= count <= 300
    assert one.value("select count(*) from postbus.log") == 1000


def test_notify_for_batches_and_each_stream(bus: Bus, one: Session) -> None:
    one.stream("t.u:v-w")
    listener = bus.session()
    listener.rows('listen "postbus.s"')
    listener.rows('listen "postbus.t.u:v-w"')
    one.fill(3)
    assert heard(listener) == ["postbus.s"]
    one.publish("p", to="t.u:v-w")
    assert heard(listener, "t.u:v-w") == ["postbus.t.u:v-w"]


@pytest.mark.parametrize("how", ["setting", "option", "altered"])
def test_notify_can_be_turned_off(bus: Bus, s: Session, how: str) -> None:
    s.stream(notify=how != "option")
    if how == "altered":
        s.alter(notify=False)
    if how == "setting":
        s.rows("set postbus.notify = off")
    listener = bus.session()
    listener.rows('listen "postbus.s"')
    s.publish("p")
    s.fill(2)
    assert heard(listener) == []
    s.rows("reset postbus.notify")
    s.alter(notify=True)
    s.publish("p")
    assert heard(listener) == ["postbus.s"]


def test_prepare_transaction_with_notify_off(bus: Bus, one: Session) -> None:
    if one.value("select current_setting('max_prepared_transactions')::int") == 0:
        pytest.skip("the server has max_prepared_transactions = 0")
    a = bus.session().begin()
    a.rows("set local postbus.notify = off")
    a.publish("prepared", "k")
    a.fill(2)
    a.rows(f"prepare transaction '{bus.db.name}'")
    assert one.take() == []
    one.rows(f"commit prepared '{bus.db.name}'")
    assert one.take() == ["prepared", "e1", "e2"]
