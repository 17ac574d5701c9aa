"""Schedules on the command line."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli
from tests.conftest import Database


@pytest.fixture
def bus(cli: Cli) -> Cli:
    cli("queues", "create", "reports")
    return cli


def test_schedules_are_made_changed_listed_and_removed(bus: Cli) -> None:
    assert "no schedules yet" in bus("schedules")
    out = bus(
        "schedule", "daily", "0 9 * * mon-fri", "reports", '{"a": 1}', "--timezone", "Europe/Zurich",
        "--type", "t", "--key", "k", "--header", "a=b", "--missed", "skip",
    )  # fmt: skip
    assert out.startswith("schedule daily fires next at ")
    [row] = bus.json("schedules")
    assert (row["name"], row["cron"], row["target"], row["payload"]) == (
        "daily", "0 9 * * mon-fri", "reports", '{"a": 1}',
    )  # fmt: skip
    assert (row["timezone"], row["type"], row["key"], row["headers"]) == (
        "Europe/Zurich", "t", "k", {"a": "b"},
    )  # fmt: skip
    assert (row["missed"], row["paused"]) == ("skip", False)
    bus("schedule", "daily", "@hourly", "reports")
    [row] = bus.json("schedules")
    assert (row["cron"], row["payload"], row["timezone"]) == ("@hourly", "{}", "UTC")
    assert "@hourly" in bus("schedules")
    assert bus("unschedule", "daily") == "removed schedule daily\n"
    assert bus.json("schedules") == []


def test_maintain_fires_what_is_due(bus: Cli, db: Database) -> None:
    bus("schedule", "often", "* * * * *", "reports", "hello", "--type", "ping")
    db.connect().execute("update postbus.schedule set next_at = date_trunc('minute', now())")
    bus("maintain")
    bus("maintain")
    [m] = bus.lines("receive", "reports", "--max", "5")
    assert (m["type"], m["payload"], m["headers"]["schedule"]) == ("ping", "hello", "often")
    assert bus.json("schedules")[0]["last_at"] is not None


def test_pause_and_resume(bus: Cli, db: Database) -> None:
    bus("schedule", "often", "* * * * *", "reports")
    assert bus("schedules", "pause", "often") == "paused schedule often\n"
    db.connect().execute("update postbus.schedule set next_at = date_trunc('minute', now())")
    bus("maintain")
    assert bus("receive", "reports") == ""
    [row] = bus.json("schedules")
    assert (row["paused"], row["next_at"]) == (True, None)
    assert bus("schedule", "often", "* * * * *", "reports") == "schedule often is paused\n"
    assert [w["remedy"] for w in bus.json("status")["warnings"]] == ["postbus schedules resume often"]
    bus("schedules", "resume", "often")
    assert bus.json("schedules")[0]["next_at"] is not None
    assert "does not exist" in bus("schedules", "pause", "nowhere", code=1)


def test_status_warns_of_schedules_that_do_not_fire(bus: Cli, db: Database) -> None:
    bus("schedule", "often", "* * * * *", "reports")
    assert bus.json("status")["warnings"] == []
    db.connect().execute("update postbus.schedule set next_at = now() - interval '10 minutes'")
    [warning] = bus.json("status")["warnings"]
    assert warning["about"] == "schedule often"
    assert warning["problem"].startswith("should have fired 10 min")
    assert warning["remedy"] == "postbus maintain --every 1"
    bus("queues", "drop", "reports")
    bus("maintain")
    [warning] = bus.json("status")["warnings"]
    assert "could not fire" in warning["problem"]
    assert "Schedules" in bus("status")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["s", "* * * *", "reports"], "does not have five fields"),
        (["s", "61 * * * *", "reports"], "wrong minute"),
        (["s", "0 0 30 2 *", "reports"], "never fires"),
        (["s", "* * * * *", "reports", "--timezone", "Mars/Base"], "unknown time zone"),
        (["s", "* * * * *", "reports", "--missed", "twice"], "missed must not be"),
        (["no spaces", "* * * * *", "reports"], "bad schedule name"),
    ],
)
def test_wrong_schedules_are_refused(bus: Cli, args: list[str], complaint: str) -> None:
    assert complaint in bus("schedule", *args, code=1)
    assert bus.json("schedules") == []
