"""Queues, key policies, topics: what the commands change is what the listings show."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.cli.conftest import Cli
from tests.conftest import Database


def test_queues_are_created_altered_listed_and_dropped(cli: Cli) -> None:
    assert "no queues yet" in cli("queues")
    given = ["--lease", "2 minutes", "--max-attempts", "3", "--on-ack", "archive", "--max-size", "10"]
    assert cli("queues", "create", "q", *given, "-o", "backoff=5", "-o", "ageing=null") == "created queue q\n"
    [row] = cli.json("queues")
    assert (row["name"], row["lease"], row["max_attempts"], row["on_ack"]) == ("q", 120, 3, "archive")
    assert (row["max_size"], row["backoff"], row["ageing"]) == (10, 5, None)
    assert datetime.fromisoformat(row["created_at"]).tzinfo is not None
    cli("queues", "alter", "q", "--lease", "7", "--on-ack", "delete", "-o", "max_size=null")
    [row] = cli.json("queues")
    assert (row["lease"], row["max_attempts"], row["on_ack"], row["max_size"]) == (7, 3, "delete", None)
    assert "q" in cli("queues")
    cli("send", "q", "x")
    assert "still holds messages" in cli("queues", "drop", "q", code=1)
    cli("queues", "drop", "q", "--force")
    assert cli.json("queues") == []


def test_create_twice_is_an_error_unless_said_otherwise(cli: Cli) -> None:
    cli("queues", "create", "q")
    assert "already exists" in cli("queues", "create", "q", code=1)
    assert cli("queues", "create", "q", "--if-not-exists") == ""
    # Streams and queues are one name space.
    assert "queue 'q' already exists" in cli("streams", "create", "q", code=1)


def test_purge_needs_force_and_deletes_everything(cli: Cli) -> None:
    cli("queues", "create", "q")
    cli("send", "q", "--lines", input="a\nb\nc\n")
    cli("receive", "q")
    assert "--force" in cli("queues", "purge", "q", code=2)
    assert cli.json("queues")[0]["ready"] == 2
    assert cli("queues", "purge", "q", "--force") == "purged 3 messages of queue q\n"
    [row] = cli.json("queues")
    assert (row["ready"], row["in_flight"]) == (0, 0)


def test_full_queue_is_a_clear_error(cli: Cli) -> None:
    cli("queues", "create", "q", "--max-size", "2")
    complaint = cli("send", "q", "--lines", input="a\nb\nc\n", code=1)
    assert "queue 'q' is full" in complaint
    assert "hint: " in complaint
    cli("send", "q", "--lines", input="a\nb\n")
    problems = {w["about"]: w["problem"] for w in cli.json("status")["warnings"]}
    assert problems["queue q"].startswith("is full")


def test_pause_and_resume(cli: Cli) -> None:
    cli("queues", "create", "q")
    cli("send", "q", "x")
    assert cli("pause", "q") == "paused q\n"
    assert cli("receive", "q") == ""
    assert [w["remedy"] for w in cli.json("status")["warnings"]] == ["postbus resume q"]
    cli("resume", "q")
    assert "x" in cli("receive", "q")
    assert "has no groups" in cli("pause", "q", "--group", "g", code=1)
    assert "stream or queue 'nowhere' does not exist" in cli("pause", "nowhere", code=1)


def test_key_policies_are_set_listed_and_unset(cli: Cli) -> None:
    cli("queues", "create", "q")
    assert "no key policies" in cli("keys")
    cli("keys", "set", "q", "--concurrency", "1")
    cli(
        "keys", "set", "q", "--key", "a", "--concurrency", "3", "--rate", "0.5", "--burst", "2",
        "--max-size", "9", "--weight", "4",
    )  # fmt: skip
    default, a = cli.json("keys", "--queue", "q")
    assert (default["key"], default["concurrency"], default["rate"]) == (None, 1, None)
    assert list(a.values()) == ["q", "a", 3, 0.5, 2, 9, 4]
    assert "(default)" in cli("keys")
    assert cli.json("keys", "--queue", "other") == []
    assert "key 'b' of queue 'q' has no policy" in cli("keys", "unset", "q", "--key", "b", code=1)
    cli("keys", "unset", "q", "--key", "a")
    cli("keys", "unset", "q")
    assert [(p["key"], p["concurrency"]) for p in cli.json("keys")] == [(None, None)]
    assert "burst goes with a rate" in cli("keys", "set", "q", "--burst", "3", code=1)


def test_one_at_a_time_per_key(cli: Cli) -> None:
    cli("queues", "create", "q")
    cli("keys", "set", "q", "--concurrency", "1")
    for key, payload in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        cli("send", "q", payload, "--key", key)
    taken = cli.lines("receive", "q", "--max", "10")
    assert sorted(m["payload"] for m in taken) == ["a1", "b1"]
    cli("ack", next(m["receipt"] for m in taken if m["key"] == "a"))
    assert [m["payload"] for m in cli.lines("receive", "q", "--max", "10")] == ["a2"]


def test_topics(cli: Cli) -> None:
    for queue in ("mail", "audit"):
        cli("queues", "create", queue)
    assert "no bindings" in cli("bindings")
    cli("bind", "mail", "orders.*")
    cli("bind", "audit")
    assert cli.json("bindings") == [
        {"queue": "audit", "stream": None, "pattern": "#"},
        {"queue": "mail", "stream": None, "pattern": "orders.*"},
    ]
    sent = cli.json("send-topic", "orders.created", "one", "--key", "k", "--header", "a=b", "--priority", "2")
    assert [row["queue"] for row in sent] == ["audit", "mail"]
    [m] = cli.lines("receive", "mail")
    assert (m["type"], m["key"], m["payload"], m["headers"]) == ("orders.created", "k", "one", {"a": "b"})
    assert m["id"] == sent[1]["id"]
    assert "audit" in cli("send-topic", "users.created", input="two")
    cli("unbind", "audit")
    assert "no queue is bound" in cli("send-topic", "users.created", "three")
    assert cli("receive", "mail") == ""
    assert "is not bound" in cli("unbind", "audit", code=1)
    assert "bad pattern" in cli("bind", "mail", "a*", code=1)


def test_events_of_a_stream_reach_a_bound_queue(cli: Cli) -> None:
    cli("streams", "create", "s")
    cli("queues", "create", "q")
    cli("bind", "q", "order.created", "--stream", "s")
    cli("publish", "s", "yes", "--type", "order.created")
    cli("publish", "s", "no", "--type", "order.paid")
    assert [m["payload"] for m in cli.lines("receive", "q", "--max", "9")] == ["yes"]
    assert cli.json("bindings")[0]["stream"] == "s"


def test_status_shows_queues(cli: Cli, db: Database) -> None:
    cli("queues", "create", "q", "--max-attempts", "1")
    cli("send", "q", "--lines", input="a\nb\nc\n")
    cli("receive", "q", "--nack", "--reason", "no good")
    cli("receive", "q")
    [row] = cli.json("status")["queues"]
    assert (row["ready"], row["in_flight"], row["dead_letters"]) == (1, 1, 1)
    out = cli("status")
    assert "warning: queue q has 1 dead letters" in out
    assert "remedy: postbus dlq list q" in out


@pytest.mark.parametrize(
    "args",
    [
        ["queues", "create", "q", "-o", "lease"],
        ["queues", "alter", "q"],
        ["queues", "purge", "q"],
        ["keys", "set", "q"],
        ["bind"],
        ["drain", "q", "--to", "q"],
    ],
)
def test_wrong_usage_exits_with_2(cli: Cli, args: list[str]) -> None:
    assert cli(*args, code=2)


@pytest.mark.parametrize(
    "args",
    [
        ["queues", "create", "q", "-o", "nonsense=1"],
        ["queues", "create", "q", "--on-ack", "burn"],
        ["queues", "create", "no spaces"],
        ["queues", "alter", "nowhere", "--lease", "1"],
        ["queues", "drop", "nowhere"],
        ["queues", "purge", "nowhere", "--force"],
        ["keys", "set", "nowhere", "--rate", "1"],
        ["send", "nowhere", "x"],
        ["receive", "nowhere"],
        ["receive", "nowhere", "--follow"],
        ["pop", "nowhere"],
        ["peek", "nowhere"],
        ["cancel", "nowhere", "1"],
        ["archived", "nowhere"],
        ["drain", "nowhere"],
        ["bind", "nowhere"],
        ["schedule", "s", "* * * * *", "nowhere"],
        ["unschedule", "nowhere"],
    ],
)
def test_what_the_engine_refuses_exits_with_1(cli: Cli, args: list[str]) -> None:
    assert cli(*args, code=1).startswith("error: ")
    assert cli.json("queues") == []
