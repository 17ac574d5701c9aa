"""Streams, groups, positions: what the commands change is what the listings show."""

from __future__ import annotations

from datetime import datetime

from tests.cli.conftest import Cli


def test_streams_are_created_altered_listed_and_dropped(cli: Cli) -> None:
    assert "no streams yet" in cli("streams")
    cli(
        "streams",
        "create",
        "orders",
        "--lanes",
        "8",
        "--retain",
        "2 days",
        "-o",
        "notify=false",
        "-o",
        "event_ttl=90",
    )
    [row] = cli.json("streams")
    assert (row["name"], row["lanes"], row["retain"], row["notify"]) == ("orders", 8, 2 * 86400, False)
    assert row["event_ttl"] == 90
    assert datetime.fromisoformat(row["created_at"]).tzinfo is not None
    cli("streams", "alter", "orders", "--retain", "3600", "-o", "event_ttl=null")
    [row] = cli.json("streams")
    assert (row["lanes"], row["retain"], row["event_ttl"]) == (8, 3600, None)
    assert "orders" in cli("streams")
    cli("streams", "drop", "orders")
    assert cli.json("streams") == []


def test_create_twice_is_an_error_unless_said_otherwise(cli: Cli) -> None:
    cli("streams", "create", "s")
    assert "already exists" in cli("streams", "create", "s", code=1)
    assert cli("streams", "create", "s", "--if-not-exists") == ""
    cli("groups", "create", "s", "g")
    assert "already has a group" in cli("groups", "create", "s", "g", code=1)
    cli("groups", "create", "s", "g", "--if-not-exists")


def test_stream_with_groups_needs_force(cli: Cli) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g")
    assert "has groups" in cli("streams", "drop", "s", code=1)
    cli("streams", "drop", "s", "--force")
    assert cli.json("groups") == []


def test_groups_are_created_altered_listed_and_dropped(cli: Cli) -> None:
    cli("streams", "create", "s")
    cli("streams", "create", "t")
    cli("groups", "create", "s", "g", "--ordering", "stream", "--max-attempts", "3")
    cli("groups", "create", "t", "h")
    assert [(g["stream"], g["group"]) for g in cli.json("groups")] == [("s", "g"), ("t", "h")]
    [group] = cli.json("groups", "--stream", "s")
    assert (group["ordering"], group["max_attempts"], group["lag"]) == ("stream", 3, 0)
    cli("groups", "alter", "s", "g", "--max-attempts", "5", "--lease", "1 minute")
    assert cli.json("groups", "--stream", "s")[0]["max_attempts"] == 5
    cli("groups", "drop", "s", "g")
    assert cli.json("groups", "--stream", "s") == []


def test_seek_moves_a_group(cli: Cli) -> None:
    cli("streams", "create", "s")
    cli("publish", "s", "one")
    cli("groups", "create", "s", "g")
    assert cli("consume", "s", "g") == ""
    cli("seek", "s", "g", "earliest")
    assert [m["payload"] for m in cli.lines("consume", "s", "g")] == ["one"]
    assert "cannot read position" in cli("seek", "s", "g", "yesterdayish", code=1)


def test_pause_and_resume(cli: Cli) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g")
    cli("publish", "s", "one")
    cli("pause", "s")
    assert cli("consume", "s", "g") == ""
    cli("resume", "s")
    cli("pause", "s", "--group", "g")
    assert cli("consume", "s", "g") == ""
    cli("resume", "s", "--group", "g")
    assert "one" in cli("consume", "s", "g")


def test_the_dsn_may_stand_at_any_level(cli: Cli) -> None:
    other = Cli("host=/nowhere dbname=wrong")
    other("--dsn", cli.dsn, "streams", "create", "top")
    other("streams", "--dsn", cli.dsn, "create", "middle")
    other("streams", "create", "last", "--dsn", cli.dsn)
    assert [s["name"] for s in cli.json("streams")] == ["last", "middle", "top"]
    assert "error" in other("streams", code=1)


def test_maintain_says_what_it_did(cli: Cli) -> None:
    assert "nothing to do" in cli("maintain")
    cli("streams", "create", "s")
    cli("publish", "s", "x")
    steps = cli.json("maintain")
    assert {"object": "s", "step": "count", "done": 1, "problem": None} in steps


def test_captured_changes_and_backfill(cli: Cli) -> None:
    import psycopg

    with psycopg.connect(cli.dsn, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, card text, total int)")
        conn.execute("insert into orders select g, 'secret', g from generate_series(1, 7) g")
        cli("streams", "create", "changes")
        cli("groups", "create", "changes", "g")
        assert "no captured tables" in cli("captures")
        out = cli("capture", "orders", "changes", "--exclude", "card", "--backfill", "--batch", "3")
        assert "backfilled 7 rows" in out
        conn.execute("update orders set total = 0 where id = 1")
    messages = []
    while more := cli.lines("consume", "changes", "g"):
        messages += more
    assert [m["type"] for m in messages] == ["snapshot"] * 7 + ["update"]
    assert not any("secret" in m["payload"] for m in messages)
    [row] = cli.json("captures")
    assert (row["stream"], row["exclude"], row["backfill_finished"]) == ("changes", ["card"], True)
    assert "orders" in cli("captures")
    assert "backfilled 7 rows" in cli("backfill", "orders", "--restart")
    cli("uncapture", "orders")
    assert cli.json("captures") == []
    assert 'relation "nowhere" does not exist' in cli("capture", "nowhere", "changes", code=1)
