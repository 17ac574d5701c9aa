"""Messages of queues: send, receive, pop, finish, look, cancel."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Start
from tests.conftest import Database


@pytest.fixture
def bus(cli: Cli) -> Cli:
    """A queue q that tries again at once, twice."""
    cli("queues", "create", "q", "-o", "backoff=0", "--max-attempts", "2")
    return cli


def payloads(cli: Cli, *args: str) -> list[str]:
    return [m["payload"] for m in cli.lines(*args)]


def test_a_message_arrives_as_sent(bus: Cli) -> None:
    sent = bus(
        "send", "q", '{"id": 1}', "--type", "made", "--key", "k", "--header", "a=b=c", "--priority", "4"
    )
    [m] = bus.lines("receive", "q")
    assert list(m) == [
        "id", "type", "key", "payload", "blob", "headers", "created_at", "attempt", "receipt",
        "priority", "state",
    ]  # fmt: skip
    assert (m["id"], m["type"], m["key"], m["payload"]) == (int(sent), "made", "k", '{"id": 1}')
    assert (m["headers"], m["priority"], m["attempt"]) == ({"a": "b=c"}, 4, 1)
    assert bus("receive", "q") == ""
    assert bus("ack", m["receipt"]) == "acked 1\n"
    assert "lease lost" in bus("ack", m["receipt"], code=1)


def test_payload_from_stdin_and_files(bus: Cli, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"from a file\n")
    bus("send", "q", "-", input="two\nlines\n")
    bus("send", "q", "--file", str(file))
    file.write_bytes(b"\x00\xff\n")
    bus("send", "q", "--binary", "--file", str(file))
    messages = bus.lines("pop", "q", "--max", "9")
    assert [m["payload"] for m in messages] == ["two\nlines", "from a file", None]
    assert base64.b64decode(messages[2]["blob"]) == b"\x00\xff\n"
    assert "--binary" in bus("send", "q", "--file", str(file), code=2)
    assert bus("send", "q", "x", "--file", str(file), code=2)
    assert bus("send", "q", "--file", str(tmp_path / "none"), code=2)
    assert bus("receive", "q") == ""


def test_every_line_is_a_message(bus: Cli, tmp_path: Path) -> None:
    lines = [f"line {n} é" for n in range(20_000)]
    file = tmp_path / "lines"
    file.write_text("\n\n" + "\r\n".join(lines))
    out = bus("send", "q", "--lines", "--file", str(file), "-k", "k", "-t", "x", "-p", "3", "--ttl", "1 hour")
    assert out == "sent 20000 messages\n"
    messages = bus.lines("pop", "q", "--max", "40000")
    assert [m["payload"] for m in messages] == lines
    assert {(m["key"], m["type"], m["priority"]) for m in messages} == {("k", "x", 3)}


def test_priority_delay_ttl_and_dedupe(bus: Cli) -> None:
    first = bus("send", "q", "plain", "--dedupe-key", "d")
    assert bus("send", "q", "again", "--dedupe-key", "d") == first
    bus("send", "q", "urgent", "--priority", "9")
    bus("send", "q", "later", "--delay", "1 hour")
    bus("send", "q", "later too", "--deliver-at", "2999-01-01 00:00+00")
    bus("send", "q", "short", "--ttl", "0.001")
    assert payloads(bus, "receive", "q", "--max", "9") == ["urgent", "plain"]
    assert [m["payload"] for m in bus.json("peek", "q", "--state", "delayed")] == ["later", "later too"]
    assert "priority" in bus("send", "q", "x", "--priority", "10", code=1)
    assert "invalid input syntax" in bus("send", "q", "x", "--delay", "soon", code=1)


def test_receive_prints_receipts_unless_it_finishes(bus: Cli) -> None:
    bus("send", "q", "--lines", "-k", "k", input="a\nb\n")
    assert bus("receive", "q", "--ack") == "1 default k a\n"
    receipt, _, rest = bus("receive", "q").partition(" ")
    assert rest == "default k b\n"
    assert bus("ack", receipt) == "acked 1\n"
    assert bus.json("queues")[0]["in_flight"] == 0


def test_receive_takes_one_or_max_and_only_a_type(bus: Cli) -> None:
    bus("send", "q", "--lines", input="a\nb\nc\n")
    bus("send", "q", "d", "--type", "t")
    assert payloads(bus, "receive", "q", "--type", "t", "--max", "9") == ["d"]
    assert payloads(bus, "receive", "q") == ["a"]
    assert payloads(bus, "receive", "q", "--max", "9", "--worker", "w", "--lease", "1 hour") == ["b", "c"]
    found = bus.json("peek", "q", "--state", "in_flight")
    assert [m["worker"] for m in found if m["payload"] in "bc"] == ["w", "w"]


def test_nack_state_and_dead_letters(bus: Cli) -> None:
    bus("send", "q", "x")
    [m] = bus.lines("receive", "q")
    assert bus("nack", m["receipt"], "--reason", "later", "--state", '{"page": 3}') == "nacked 1\n"
    [m] = bus.lines("receive", "q")
    assert (m["attempt"], m["state"]) == (2, {"page": 3})
    bus("nack", m["receipt"], "--reason", "no good")
    [letter] = bus.json("dlq", "list", "q")
    assert (letter["payload"], letter["attempt"], letter["reason"]) == ("x", 2, "no good")
    listing = bus("dlq", "list", "q")
    assert "MESSAGE" in listing
    assert "GROUP" not in listing
    assert bus("dlq", "redrive", "q", str(letter["id"])) == "redrove 1 of q\n"
    [m] = bus.lines("receive", "q")
    assert (m["id"], m["attempt"]) == (letter["event_id"], 1)
    assert bus("dead-letter", m["receipt"], "--reason", "given up") == "gave up 1\n"
    assert bus("dlq", "purge", "q", "--older-than", "0") == "purged 1 of q\n"
    assert "no dead letters" in bus("dlq", "list", "q")


def test_receive_nack_brings_messages_back_once_per_run(bus: Cli) -> None:
    bus("send", "q", "x")
    assert [m["attempt"] for m in bus.lines("receive", "q", "--max", "5", "--nack")] == [1]
    assert [m["attempt"] for m in bus.lines("receive", "q", "--max", "5", "--nack", "--reason", "r")] == [2]
    assert bus.json("dlq", "list", "q")[0]["reason"] == "r"


def test_nack_with_a_delay(bus: Cli) -> None:
    bus("send", "q", "x")
    bus("nack", bus.lines("receive", "q")[0]["receipt"], "--delay", "1 hour")
    assert bus("receive", "q") == ""
    [m] = bus.json("peek", "q")
    assert (m["state"], m["reason"], m["attempt"]) == ("delayed", "nack", 1)


def test_extend(bus: Cli) -> None:
    bus("send", "q", "x")
    [m] = bus.lines("receive", "q", "--lease", "5")
    before = bus.json("in-flight", "q")[0]["expires_at"]
    assert bus("extend", m["receipt"], "--lease", "1 hour", "--state", "[1]").startswith("held until ")
    [row] = bus.json("in-flight", "q")
    assert row["expires_at"] > before
    assert bus.json("peek", "q")[0]["saved"] == [1]
    assert "longer than zero" in bus("extend", m["receipt"], "--lease", "0", code=1)
    assert bus("ack", m["receipt"]) == "acked 1\n"


def test_verbs_take_receipts_of_streams_and_many(bus: Cli) -> None:
    bus("streams", "create", "s")
    bus("groups", "create", "s", "g")
    bus("publish", "s", "x")
    bus("send", "q", "--lines", input="a\nb\n")
    [event] = bus.lines("consume", "s", "g", "--no-ack")
    receipts = [m["receipt"] for m in bus.lines("receive", "q", "--max", "2")]
    assert {row["stream"] for row in bus.json("in-flight")} == {"q", "s"}
    assert bus("ack", event["receipt"], *receipts) == "acked 3\n"
    assert "nothing is out" in bus("in-flight")
    assert "is not a receipt" in bus("nack", "nonsense", code=1)


def test_peek_by_state_id_and_key(bus: Cli) -> None:
    bus("send", "q", "a", "-k", "k")
    bus("send", "q", "b")
    bus("send", "q", "c", "--delay", "1 hour", "-k", "k")
    bus("receive", "q")
    assert [m["state"] for m in bus.json("peek", "q", "--key", "k")] == ["in_flight", "delayed"]
    assert [m["payload"] for m in bus.json("peek", "q", "--id", "2")] == ["b"]
    assert [m["payload"] for m in bus.json("peek", "q", "--state", "ready")] == ["b"]
    assert len(bus.json("peek", "q", "--max", "2")) == 2
    assert "delayed" in bus("peek", "q")
    assert "unknown state" in bus("peek", "q", "--state", "odd", code=1)
    assert "nothing there" in bus("peek", "q", "--id", "99")


def test_cancel_says_what_it_could_not(bus: Cli) -> None:
    bus("send", "q", "--lines", input="a\nb\nc\n")
    bus("receive", "q")
    complaint = bus("cancel", "q", "1", "2", "77", code=1)
    assert "not cancelled: 1, 77" in complaint
    assert bus("cancel", "q", "3") == "cancelled 1 of queue q\n"
    assert [m["id"] for m in bus.json("peek", "q")] == [1]


def test_archived(bus: Cli) -> None:
    bus("queues", "create", "kept", "--on-ack", "archive")
    bus("send", "kept", "a", "--key", "k")
    bus("send", "kept", "b")
    bus("receive", "kept", "--max", "2", "--ack", "--worker", "w")
    found = bus.json("archived", "kept")
    assert sorted(m["payload"] for m in found) == ["a", "b"]
    assert [m["worker"] for m in found] == ["w", "w"]
    assert [m["payload"] for m in bus.json("archived", "kept", "--key", "k")] == ["a"]
    wanted = next(m for m in found if m["payload"] == "b")
    assert [m["payload"] for m in bus.json("archived", "kept", "--id", str(wanted["id"]))] == ["b"]
    since = ["--since", wanted["finished_at"]]
    assert "b" in [m["payload"] for m in bus.json("archived", "kept", *since)]
    assert bus.json("archived", "kept", *since, "--until", wanted["finished_at"]) == []
    assert len(bus.json("archived", "kept", "--max", "1")) == 1
    assert "FINISHED" in bus("archived", "kept")
    assert "nothing in the archive" in bus("archived", "q")


@pytest.mark.parametrize(
    "args",
    [
        ["send", "q", "x", "--delay", "1", "--deliver-at", "2999-01-01"],
        ["send", "q", "x", "--lines"],
        ["send", "q", "--lines", "--dedupe-key", "k"],
        ["send", "q", "x", "--header", "nothing"],
        ["send", "q", "x", "--binary"],
        ["receive", "q", "--ack", "--nack"],
        ["receive", "q", "--max", "0"],
        ["cancel", "q"],
        ["ack"],
    ],
)
def test_wrong_usage_exits_with_2(bus: Cli, args: list[str]) -> None:
    assert bus(*args, code=2)
    assert bus.json("peek", "q") == []


def lines_of(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def test_follow_prints_what_comes_until_ctrl_c(bus: Cli, start: Start) -> None:
    process = start(bus.dsn, "receive", "q", "--follow", "--ack", "--json")
    for n in range(3):
        bus("send", "q", str(n), *(["--delay", "0.2"] if n == 1 else []))
        [line] = lines_of(process, 1)
        assert json.loads(line)["payload"] == str(n)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
    assert bus.json("peek", "q") == []


def test_closed_pipe_gives_messages_back(bus: Cli, start: Start) -> None:
    bus("send", "q", "--lines", input="\n".join("x" * 200 for _ in range(3000)))
    process = start(bus.dsn, "receive", "q", "--max", "3000", "--ack")
    lines_of(process, 1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(30) == 128 + signal.SIGPIPE
    left = bus.json("queues")[0]
    assert left["in_flight"] == 0
    assert left["ready"] > 0
    assert bus.lines("receive", "q", "--max", "3000")[-1]["attempt"] == 2


def test_writer_may_send_and_receive_and_reader_may_look(bus: Cli, db: Database, server_dsn: str) -> None:
    from psycopg.conninfo import make_conninfo

    from tests.conftest import run_sql

    roles = [f"{kind}_of_{db.name}" for kind in ("reader", "writer")]
    for role in roles:
        run_sql(server_dsn, "create role {} login in role {}", role, f"postbus_{role[:6]}")
    try:
        reader, writer = (Cli(make_conninfo(db.dsn, user=role)) for role in roles)
        writer("send", "q", "--lines", "-k", "k", input="a\nb\n")
        assert writer("cancel", "q", "2") == "cancelled 1 of queue q\n"
        [m] = writer.lines("receive", "q")
        assert len(reader.json("peek", "q")) == len(reader.json("in-flight")) == 1
        assert reader.json("keys") == reader.json("bindings") == reader.json("schedules") == []
        assert reader.json("status")["queues"][0]["in_flight"] == 1
        writer("extend", m["receipt"])
        writer("ack", m["receipt"])
        assert "permission denied" in reader("send", "q", "x", code=1)
        assert "permission denied" in writer("queues", "purge", "q", "--force", code=1)
    finally:
        for role in roles:
            run_sql(server_dsn, "drop role {}", role)
