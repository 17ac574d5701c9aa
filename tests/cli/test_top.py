"""``postbus top``: on a terminal, into a pipe, as JSON; how it ends, and what it survives."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import psycopg
import pytest

from postbus.cli._samples import Sampler
from postbus.cli._screen import age, count, rate, sparkline
from postbus.embedded import Server
from postbus.engine import install
from tests.cli.conftest import Cli, Start, run_process
from tests.cli.terminal import Terminal
from tests.conftest import Database, fast_directory

FAST = ("top", "--every", "0.1")


def has(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def test_screen_appears_changes_and_ends_with_q(cli: Cli) -> None:
    cli("queues", "create", "emails")
    cli("streams", "create", "orders")
    cli("groups", "create", "orders", "billing")
    with Terminal(cli.dsn, *FAST) as terminal:
        screen = terminal.wait_for(has(r"^emails +0 +0 +0 ").search)
        assert "PostgreSQL" in screen
        assert "upkeep ok" in screen
        assert has(r"^orders").search(screen)
        assert has(r"^ billing +0 +0 +0 ").search(screen)
        cli("send", "emails", "--lines", input="a\nb\nc\n")
        cli("publish", "orders", "--lines", input="a\nb\n")
        terminal.wait_for(has(r"^emails +3 +0 +0 .*[▁-█]").search)
        terminal.wait_for(has(r"^ billing +2 +0 +0 .*[▁-█]").search)
        cli("receive", "emails", "--max", "1")
        terminal.wait_for(has(r"^emails +2 +0 +1 ").search)
        terminal.type(b"xq")
        assert terminal.end() == 0
        assert terminal.restored()
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", 130), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(cli: Cli, how: str | signal.Signals, code: int) -> None:
    with Terminal(cli.dsn, *FAST) as terminal:
        terminal.wait_for(has("QUEUE").search)
        if isinstance(how, str):
            terminal.type(b"\x03")
        else:
            terminal.process.send_signal(how)
        assert terminal.end() == code
        assert terminal.restored()
        assert "Traceback" not in terminal.text


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (132, 50), (30, 6)])
def test_screens_of_all_sizes(cli: Cli, db: Database, columns: int, lines: int) -> None:
    conn = db.connect()
    conn.execute(
        "select postbus.create_queue('queue_with_a_rather_long_name_' || i) from generate_series(1, 30) i"
    )
    conn.execute("select postbus.create_stream('stream_' || i) from generate_series(1, 5) i")
    conn.execute("select postbus.create_group('stream_' || i, 'g') from generate_series(1, 5) i")
    conn.execute("select postbus.send('queue_with_a_rather_long_name_30', 'x')")
    with Terminal(cli.dsn, *FAST, "--count", "2", columns=columns, lines=lines) as terminal:
        assert terminal.end() == 0
        assert terminal.restored()
    [_, screen] = terminal.screens()[-2:]
    rows = screen.split("\r\n")
    assert len(rows) <= lines
    assert all(len(row) <= columns for row in rows)
    if columns >= 80:
        assert len(rows) == lines
        assert re.search(r"^\.\.\. \d+ more", screen, re.MULTILINE) or lines >= 50
        # The one with something in it is among those that are shown.
        assert re.search(r"^queue_with.* 1 +0 +0 ", screen, re.MULTILINE)
        assert "stream_5" in screen


def test_findings_are_at_the_bottom(cli: Cli) -> None:
    cli("queues", "create", "emails")
    cli("pause", "emails")
    with Terminal(cli.dsn, *FAST, "--count", "1") as terminal:
        assert terminal.end() == 0
    assert "! queue emails is paused: postbus resume emails" in terminal.screens()[-1]


def test_a_server_that_is_restarted_is_waited_for(tmp_path: Path) -> None:
    folder = Path(fast_directory() or tmp_path) / f"top-{tmp_path.name}"
    server = Server(folder, settings={"fsync": "off"})
    try:
        with server:
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                install(conn)
                conn.execute("select postbus.create_queue('emails')")
            with Terminal(server.dsn, *FAST) as terminal:
                terminal.wait_for(has(r"^emails +0 ").search)
                server.stop()
                terminal.wait_for(has("^reconnecting: .*\n(.*\n)*emails").search)
                server.start()
                with psycopg.connect(server.dsn, autocommit=True) as conn:
                    conn.execute("select postbus.send('emails', 'x')")
                screen = terminal.wait_for(has(r"^emails +1 ").search)
                assert "reconnecting" not in screen
                terminal.type(b"q")
                assert terminal.end() == 0
                assert "Traceback" not in terminal.text
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_json_goes_on_after_the_connection_was_lost(cli: Cli, db: Database, start: Start) -> None:
    process = start(cli.dsn, *FAST, "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    db.connect().execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'postbus' and datname = current_database()"
    )
    assert process.stderr.readline().startswith("postbus: reconnecting: ")
    for _ in range(3):
        assert json.loads(process.stdout.readline())["queues"] == []
    process.terminate()
    assert process.wait(20) == 143


def test_one_plain_screen_where_there_is_no_terminal(cli: Cli) -> None:
    cli("queues", "create", "emails")
    code, out, err = run_process(cli.dsn, "top")
    assert (code, err) == (0, "")
    assert out.count("QUEUE") == 1
    assert has(r"^emails +0 +0 +0 +- ").search(out)
    assert "\x1b" not in out
    assert "quits" not in out
    code, out, err = run_process(cli.dsn, *FAST, "--count", "3")
    assert (code, out.count("QUEUE")) == (0, 3)


def test_without_utf8_there_are_plain_marks(cli: Cli) -> None:
    cli("queues", "create", "emails")
    cli("send", "emails", "x")
    code, out, err = run_process(cli.dsn, "top", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (code, err) == (0, "")
    assert out.isascii()
    assert has(r"^emails +1 .*@$").search(out)


def test_json_line_by_line(cli: Cli) -> None:
    cli("queues", "create", "emails")
    cli("streams", "create", "orders")
    cli("groups", "create", "orders", "billing")
    cli("publish", "orders", "x")
    first, second = cli.lines(*FAST, "--count", "2")
    assert list(first) == ["at", "server", "totals", "queues", "streams", "groups", "findings"]
    assert first["server"]["database"] == psycopg.conninfo.conninfo_to_dict(cli.dsn)["dbname"]
    [queue], [stream], [group] = first["queues"], first["streams"], first["groups"]
    assert (queue["queue"], queue["depth"], queue["change_per_second"]) == ("emails", 0, None)
    assert (stream["stream"], stream["sent_total"], stream["in_per_second"]) == ("orders", 1, None)
    assert (group["stream"], group["group"], group["pending_events"]) == ("orders", "billing", 1)
    assert second["queues"][0]["change_per_second"] == 0
    assert second["at"] > first["at"]


def test_closed_pipe(cli: Cli, start: Start) -> None:
    process = start(cli.dsn, *FAST, "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_rates_are_differences_between_samples(db: Database) -> None:
    conn = db.connect()
    conn.execute("select postbus.create_queue('q')")
    conn.execute("select postbus.create_stream('s'), postbus.create_group('s', 'g')")
    sampler = Sampler(keep=10)
    before = sampler.read(conn)
    assert before.queues["q"]["change_per_second"] is None
    conn.execute("select postbus.send('q', 'x') from generate_series(1, 10)")
    conn.execute("select postbus.pop('q', 4)")
    conn.execute("select postbus.publish('s', 'x') from generate_series(1, 8)")
    conn.execute("select postbus.ack(batch) from postbus.consume('s', 'g', 5) limit 1")
    after = sampler.read(conn)
    seconds = after.clock - before.clock
    assert after.totals["in_per_second"] == pytest.approx(10 / seconds)
    assert after.queues["q"]["change_per_second"] == pytest.approx(6 / seconds)
    assert after.streams["s"]["in_per_second"] == pytest.approx(8 / seconds)
    assert after.groups["s", "g"]["out_per_second"] == pytest.approx(5 / seconds)
    assert list(sampler.past["q"]) == [0, 6]
    conn.execute("select postbus.drop_queue('q', true)")
    conn.execute("select postbus.create_queue('other')")
    assert sampler.read(conn).queues["other"]["change_per_second"] is None
    sampler.forget()
    assert sampler.read(conn).totals["in_per_second"] is None


def test_an_engine_without_these_figures_is_old(db: Database, cli: Cli) -> None:
    db.connect().execute("drop function postbus.metrics()")
    assert "postbus upgrade" in cli("top", code=1)


def test_numbers_fit_their_columns() -> None:
    assert [count(v) for v in (0, 9999, 10_000, 12_345, 999_999, 1_234_567, 5e9)] == [
        "0", "9999", "10k", "12.3k", "1M", "1.23M", "5G",
    ]  # fmt: skip
    assert [rate(v) for v in (None, 0, 99.96, 100, 12_345)] == ["-", "0.0", "100.0", "100", "12.3k"]
    assert [rate(v, sign=True) for v in (5, -5, 0)] == ["+5.0", "-5.0", "0.0"]
    assert [age(v) for v in (0.04, 9.96, 119, 120, 7199, 7200, 200_000)] == [
        "0.0 s", "10.0 s", "119 s", "2 min", "120 min", "2 h", "2 d",
    ]  # fmt: skip
    assert all(len(count(v)) <= 6 and len(rate(v)) <= 6 for v in (10**i * 9.996 for i in range(12)))


def test_sparklines() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "  "
    assert sparkline([0, 1, 50, 100], 5) == " ▁▄█"
    assert sparkline(range(100), 3) == "███"
    assert sparkline([0, 1, 100], 5, utf8=False) == " .@"
