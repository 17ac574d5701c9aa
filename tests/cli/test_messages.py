"""Publish, consume and dead letters."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest

from tests.cli.conftest import Cli


@pytest.fixture
def bus(cli: Cli) -> Cli:
    """A stream s with a group g that tries again at once, twice."""
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g", "-o", "backoff=0", "--max-attempts", "2")
    return cli


def test_an_event_arrives_as_published(bus: Cli) -> None:
    published = bus(
        "publish", "s", '{"id": 1}', "--type", "made", "--key", "k", "--header", "a=b=c", "--header", "d="
    )
    [m] = bus.lines("consume", "s", "g")
    assert list(m) == [
        "id", "type", "key", "payload", "blob", "headers", "created_at", "attempt", "receipt", "batch",
    ]  # fmt: skip
    assert (m["type"], m["key"], m["payload"], m["blob"], m["attempt"]) == ("made", "k", '{"id": 1}', None, 1)
    assert m["headers"] == {"a": "b=c", "d": ""}
    assert m["id"] == int(published)
    assert datetime.fromisoformat(m["created_at"]).tzinfo == UTC
    assert bus("consume", "s", "g") == ""


def test_payload_from_stdin(bus: Cli) -> None:
    bus("publish", "s", "-", input="two\nlines\n")
    bus("publish", "s", input="no newline")
    bus("publish", "s", "--binary", input=b"\x00\xff\n")
    messages = bus.lines("consume", "s", "g")
    assert [m["payload"] for m in messages] == ["two\nlines", "no newline", None]
    assert base64.b64decode(messages[2]["blob"]) == b"\x00\xff\n"


def test_text_that_is_none_is_refused(bus: Cli) -> None:
    assert "--binary" in bus("publish", "s", input=b"\xff", code=2)
    assert "--binary" in bus("publish", "s", input=b"a\0b", code=2)
    assert "--binary" in bus("publish", "s", "--lines", input=b"fine\nnot \xff\n", code=2)
    assert bus("consume", "s", "g") == ""


def test_every_line_is_an_event(bus: Cli) -> None:
    lines = [f"line {n} é" for n in range(30_000)]
    text = "\n\n" + "\r\n".join(lines)
    assert "published 30000 events" in bus("publish", "s", "--lines", "--key", "k", "-t", "x", input=text)
    messages = bus.lines("consume", "s", "g", "--max", "40000")
    assert [m["payload"] for m in messages] == lines
    assert {(m["key"], m["type"]) for m in messages} == {("k", "x")}


def test_dedupe_and_delay(bus: Cli) -> None:
    first = bus("publish", "s", "a", "--dedupe-key", "d")
    assert bus("publish", "s", "b", "--dedupe-key", "d") == first
    bus("publish", "s", "later", "--delay", "1 hour")
    bus("publish", "s", "later too", "--deliver-at", "2999-01-01 00:00+00")
    bus("publish", "s", "now", "--delay", "0")
    assert [m["payload"] for m in bus.lines("consume", "s", "g")] == ["a", "now"]
    assert bus.json("streams")[0]["scheduled"] == 2
    assert "invalid input syntax" in bus("publish", "s", "x", "--deliver-at", "someday", code=1)


def test_max_bounds_what_is_taken(bus: Cli) -> None:
    bus("publish", "s", "--lines", input="\n".join("abcde"))
    assert [m["payload"] for m in bus.lines("consume", "s", "g", "--max", "2")] == ["a", "b"]
    assert [m["payload"] for m in bus.lines("consume", "s", "g")] == ["c", "d", "e"]


def test_consume_reads_every_lane(cli: Cli) -> None:
    cli("streams", "create", "s", "--lanes", "8")
    cli("groups", "create", "s", "g")
    cli("publish", "s", "--lines", input="\n".join(str(n) for n in range(50)))
    assert len(cli.lines("consume", "s", "g")) == 50


def test_no_ack_leaves_the_lease(bus: Cli) -> None:
    bus("publish", "s", "x")
    assert "x" in bus("consume", "s", "g", "--no-ack")
    assert bus("consume", "s", "g") == ""
    assert bus.json("groups")[0]["in_flight"] == 1


def test_nack_brings_messages_back_once_per_run_until_they_are_dead(bus: Cli) -> None:
    bus("publish", "s", "x")
    assert [m["attempt"] for m in bus.lines("consume", "s", "g", "--nack", "--reason", "no good")] == [1]
    assert "(attempt 2)" in bus("consume", "s", "g", "--nack", "--reason", "no good")
    assert bus("consume", "s", "g") == ""
    [letter] = bus.json("dlq", "list", "s")
    assert (letter["payload"], letter["attempt"], letter["reason"]) == ("x", 2, "no good")
    assert "no good" in bus("dlq", "list", "s", "--group", "g")

    assert "redrove 1" in bus("dlq", "redrive", "s", str(letter["id"]))
    assert [m["attempt"] for m in bus.lines("consume", "s", "g")] == [1]
    assert "no dead letters" in bus("dlq", "list", "s")


def test_dead_letters_are_redriven_all_or_purged(bus: Cli) -> None:
    bus("publish", "s", "--lines", input="a\nb\n")
    for _ in range(2):
        bus("consume", "s", "g", "--nack")
    assert "redrove 2" in bus("dlq", "redrive", "s", "--all")
    for _ in range(2):
        bus("consume", "s", "g", "--nack")
    assert "purged 0" in bus("dlq", "purge", "s")
    assert "purged 2" in bus("dlq", "purge", "s", "--older-than", "0")
    assert "only 0 of the 1" in bus("dlq", "redrive", "s", "1", code=1)


def test_a_terminal_is_not_steered_by_payloads(bus: Cli) -> None:
    bus("publish", "s", "-", input="\x1b[31mred\nline\ttab")
    assert "\\x1b[31mred\nline\ttab" in bus("consume", "s", "g")


@pytest.mark.parametrize(
    "args",
    [
        ["publish", "s", "x", "--delay", "1", "--deliver-at", "2999-01-01"],
        ["publish", "s", "x", "--lines"],
        ["publish", "s", "--lines", "--dedupe-key", "k"],
        ["publish", "s", "x", "--header", "nothing"],
        ["streams", "create", "t", "-o", "lanes"],
        ["streams", "alter", "s"],
        ["groups", "alter", "s", "g"],
        ["dlq", "redrive", "s"],
        ["dlq", "redrive", "s", "1", "--all"],
        ["consume", "s"],
        ["uninstall"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_with_2(bus: Cli, args: list[str]) -> None:
    assert bus(*args, code=2)
    assert bus("consume", "s", "g") == ""
