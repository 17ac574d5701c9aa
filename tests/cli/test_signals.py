"""Commands that go on, and how they end: signals, closed pipes, a server that goes away."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import psycopg
import pytest

from tests.cli.conftest import Cli, Start
from tests.conftest import Database


def lines_of(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def test_closed_pipe_gives_messages_back(cli: Cli, start: Start) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g")
    cli("publish", "s", "--lines", input="\n".join("x" * 200 for _ in range(3000)))
    process = start(cli.dsn, "consume", "s", "g", "--max", "3000")
    lines_of(process, 1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 128 + signal.SIGPIPE
    again = cli.lines("consume", "s", "g")
    assert again[0]["attempt"] == 2


def test_closed_pipe_of_a_listing(start: Start) -> None:
    process = start(None, "sql")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 128 + signal.SIGPIPE


def test_follow_prints_what_comes_until_ctrl_c(cli: Cli, start: Start) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g")
    process = start(cli.dsn, "consume", "s", "g", "--follow", "--json")
    for n in range(3):
        cli("publish", "s", str(n))
        [line] = lines_of(process, 1)
        assert json.loads(line)["payload"] == str(n)
    # It prints, then acks: Ctrl-C in between would give the message back.
    with psycopg.connect(cli.dsn, autocommit=True) as conn:
        until = time.monotonic() + 30
        while conn.execute("select from postbus.in_flight('s')").fetchone() is not None:
            assert time.monotonic() < until
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
    assert cli("consume", "s", "g") == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tail_leaves_no_group_behind(cli: Cli, number: signal.Signals, start: Start) -> None:
    cli("streams", "create", "s", "--lanes", "4")
    cli("publish", "s", "old")
    process = start(cli.dsn, "tail", "s", "--json")
    wait_for_group(cli)
    cli("publish", "s", "--lines", input="a\nb\nc\n")
    assert [json.loads(line)["payload"] for line in lines_of(process, 3)] == ["a", "b", "c"]
    process.send_signal(number)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 128 + number
    assert cli.json("groups") == []


def test_killed_tail_is_cleaned_up_after(cli: Cli, start: Start) -> None:
    cli("streams", "create", "s")
    cli("publish", "s", "old")
    dead, alive = (start(cli.dsn, "tail", "s", "--from", "earliest") for _ in range(2))
    lines_of(dead, 1)
    lines_of(alive, 1)
    dead.kill()
    dead.communicate()
    deadline = time.monotonic() + 30
    while not (warnings := cli.json("status")["warnings"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [w["remedy"] for w in warnings] == ["postbus maintain"]
    cli("maintain")
    assert len(cli.json("groups")) == 1
    cli("publish", "s", "new")
    assert lines_of(alive, 1) == ["2 default new"]
    alive.terminate()
    alive.communicate(timeout=30)
    assert cli.json("groups") == []


def test_lines_are_published_as_they_come(cli: Cli, start: Start) -> None:
    cli("streams", "create", "s")
    cli("groups", "create", "s", "g")
    process = start(cli.dsn, "publish", "s", "--lines")
    assert process.stdin is not None
    process.stdin.write("first\n")
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not (found := cli("consume", "s", "g")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "first" in found
    out, err = process.communicate("second", timeout=30)
    assert (out, err) == ("published 2 events\n", "")


def test_maintain_every_runs_until_told_to_stop(cli: Cli, start: Start) -> None:
    cli("streams", "create", "s")
    process = start(cli.dsn, "maintain", "--every", "0.05", "--json")
    cli("publish", "s", "x")
    steps = [json.loads(line)["step"] for line in lines_of(process, 2)]
    assert "count" in steps
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    process.communicate()


def test_server_that_goes_away(cli: Cli, db: Database, start: Start) -> None:
    cli("streams", "create", "s")
    process = start(cli.dsn, "tail", "s")
    wait_for_group(cli)
    db.connect().execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'postbus'"
    )
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err


def wait_for_group(cli: Cli) -> None:
    deadline = time.monotonic() + 30
    while not cli.json("groups"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
