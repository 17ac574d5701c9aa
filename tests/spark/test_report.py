"""report: its figures beside the same figures counted in plain Python, and its page."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from postbus.errors import AlreadyExists, BadArgument, NotFound
from postbus.lake import open_table
from postbus.pipelines import archive, report
from tests.cli.conftest import Cli
from tests.conftest import Database
from tests.pipelines.report_page import Page
from tests.spark.lake import Bench

pytestmark = pytest.mark.timeout(300)

BEGIN = dt.datetime(2026, 3, 1, 10, 0, tzinfo=dt.UTC)
HOUR = 3600
HOSTILE = '<script>alert("1")</script>&amp;$x^2$'
NAMES = ("shop", "visits", HOSTILE, "\u202e\x07日本 $\\frac{1}", "k" * 500)


def at(seconds: float) -> dt.datetime:
    return BEGIN + dt.timedelta(seconds=seconds)


@dataclass
class Facts:
    """What the test did, so that it can be counted without the database."""

    bench: Bench
    events: list[tuple[str, str, str | None, float]] = field(default_factory=list)
    finished: list[tuple[float, float, int]] = field(default_factory=list)  # sent, finished, attempt

    def clock(self, seconds: float) -> None:
        self.bench.c.execute("select set_config('postbus.fake_now', %s, false)", [at(seconds).isoformat()])

    def publish(self, stream: str, type: str, key: str | None, *moments: float) -> None:
        for seconds in moments:
            self.clock(seconds)
            query = "select postbus.publish(%s, '{}', type => %s, key => %s)"
            self.bench.c.execute(query, [stream, type, key])
            self.events.append((stream, type, key, seconds))

    def work(self, sent: float, *tries: float) -> None:
        """A message that is finished at the last of these times, and given back at those before."""
        c = self.bench.c
        self.clock(sent)
        c.execute("select postbus.send('emails', 'x')")
        for number, seconds in enumerate(tries, 1):
            self.clock(seconds)
            (receipt,) = c.execute("select receipt from postbus.receive('emails')").fetchone() or ("",)
            verb = "ack(%s)" if number == len(tries) else "nack(%s, delay => '0')"
            c.execute(f"select postbus.{verb}".encode(), [receipt])
        self.finished.append((sent, tries[-1], len(tries)))

    def sessions(self, gap: float) -> dict[tuple[str, str], list[list[float]]]:
        by_key: dict[tuple[str, str], list[float]] = defaultdict(list)
        for stream, _, key, seconds in self.events:
            if key is not None:
                by_key[stream, key].append(seconds)
        found: dict[tuple[str, str], list[list[float]]] = {}
        for place, moments in by_key.items():
            for seconds in sorted(moments):
                if place in found and seconds - found[place][-1][-1] <= gap:
                    found[place][-1].append(seconds)
                else:
                    found.setdefault(place, []).append([seconds])
        return found


def rank(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def rows(lake: Path, name: str) -> list[dict[str, Any]]:
    return list(open_table(str(lake), f"report_{name}").read().to_pylist())


def close(found: dict[str, Any], expected: list[float]) -> bool:
    wanted = [rank(expected, 0.5), rank(expected, 0.95), rank(expected, 0.99), max(expected)]
    return [found[p] for p in ("p50", "p95", "p99", "max")] == pytest.approx(wanted, abs=1e-9)


def prepared(bench: Bench, lake: Path) -> Facts:
    """Events that are live, archived, both, and of a stream that was dropped and made again; and messages."""
    facts = Facts(bench)
    for stream in ("shop", "visits", "old", "empty"):
        bench.stream(stream)
    facts.publish("shop", "order.placed", "ann", 0, 10, 1810, 1811, 9000)
    facts.publish("shop", HOSTILE, NAMES[3], 7, 7, 3600, 3601.5)
    facts.publish("old", "a", None, 50, 60)
    archive(["shop", "old"], dsn=bench.db.dsn, lake=lake, spark=bench.spark)
    bench.c.execute("select postbus.drop_stream('old', force => true)")
    bench.stream("old")
    facts.publish("old", "a", None, 50.5)  # the id of another event
    facts.publish("shop", "order.placed", "bob", 7200, 7300)
    facts.publish("visits", "page", HOSTILE, 100, 1900, 3700)
    facts.publish("visits", "page", NAMES[4], 5000)
    c = bench.c
    c.execute(
        """select postbus.create_queue('emails', '{"on_ack": "archive", "archive_retain": "900 years"}')"""
    )
    c.execute("""select postbus.create_queue('jobs', '{"max_attempts": 1}'), postbus.create_queue('idle')""")
    for n in range(20):
        facts.work(100 * n, 100 * n + 1 + n / 10)
    facts.work(5000, 5001, 5040)
    for n in range(3):
        facts.clock(60 * n)
        c.execute("select postbus.send('jobs', 'x')")
        facts.clock(60 * n + 5)
        c.execute("select postbus.nack(receipt, reason => %s) from postbus.receive('jobs')", [HOSTILE])
    c.execute("""select postbus.create_group('visits', 'counting', '{"start": "earliest"}')""")
    facts.clock(8000)
    c.execute("select postbus.dead_letter(receipt, 'odd') from postbus.consume('visits', 'counting', 1)")
    return facts


def test_the_figures_and_the_page(bench: Bench, tmp_path: Path) -> None:
    lake, out = tmp_path / "lake", tmp_path / "report.html"
    facts = prepared(bench, lake)
    seen: list[Any] = []
    run = report(
        dsn=bench.db.dsn, lake=lake, out=out, bucket="1h", session_gap=1800, top=3, spark=bench.spark,
        progress=lambda *a: seen.append(a),
    )  # fmt: skip
    total = len(facts.events) + len(facts.finished) + 4
    assert (run.kind, run.state, run.rows, run.bytes) == ("report", "done", total, out.stat().st_size)
    assert [a[:2] for a in seen] == [(0, None), (len(facts.events), None), (total, total)]
    assert {r["run"] for name in ("throughput", "types", "errors") for r in rows(lake, name)} == {run.id}

    buckets = Counter((stream, at(seconds // HOUR * HOUR)) for stream, _, _, seconds in facts.events)
    published = {
        (r["name"], r["begins"]): (r["messages"], r["per_second"])
        for r in rows(lake, "throughput") if r["kind"] == "stream"
    }  # fmt: skip
    assert published == {place: (n, n / HOUR) for place, n in buckets.items()}
    done = {r["begins"]: r["messages"] for r in rows(lake, "throughput") if r["kind"] == "queue"}
    assert done == Counter(at(end // HOUR * HOUR) for _, end, _ in facts.finished)

    types = Counter((stream, kind) for stream, kind, _, _ in facts.events)
    of = Counter(stream for stream, _, _, _ in facts.events)
    assert {(r["stream"], r["type"]): (r["events"], r["share"]) for r in rows(lake, "types")} == {
        place: (n, n / of[place[0]]) for place, n in types.items()
    }
    sessions = facts.sessions(1800)
    assert len(sessions["shop", "ann"]) == 2, "a pause as long as the gap ends none"
    keyed = Counter(stream for stream, _, key, _ in facts.events if key is not None)
    keys = {(r["stream"], r["key"]): (r["events"], r["sessions"], r["share"]) for r in rows(lake, "keys")}
    assert keys == {
        place: (n, len(s), n / keyed[place[0]]) for place, s in sessions.items() for n in [sum(map(len, s))]
    }
    whole = {r["stream"]: r for r in rows(lake, "sessions") if r["length"] == "all"}
    assert set(whole) == {"shop", "visits"}
    for stream, row in whole.items():
        mine = [one for place, s in sessions.items() if place[0] == stream for one in s]
        assert (row["sessions"], row["events"]) == (len(mine), sum(map(len, mine)))
        assert row["keys"] == sum(place[0] == stream for place in sessions)
        assert close(row, [one[-1] - one[0] for one in mine])
    lengths = {r["length"]: r["sessions"] for r in rows(lake, "sessions") if r["stream"] == "shop"}
    assert lengths == {"all": 5, "one event": 1, "up to 10 s": 2, "up to 10 min": 1, "up to 1 h": 1}

    latency = {(r["name"], r["outcome"], r["period"], r["begins"]): r for r in rows(lake, "latency")}
    took = [end - sent for sent, end, _ in facts.finished]
    (first_end, *_) = (end for _, end, _ in facts.finished)
    emails = latency["emails", "finished", "all", at(first_end)]
    assert emails["messages"] == len(took)
    assert close(emails, took)
    hour = [end - sent for sent, end, _ in facts.finished if end // HOUR == 0]
    assert close(latency["emails", "finished", "bucket", BEGIN], hour)
    assert close(latency["jobs", "dead", "all", at(5)], [5, 5, 5])
    assert close(latency["visits", "dead", "all", at(8000)], [7900])

    errors = {(r["name"], r["group"]): r for r in rows(lake, "errors") if r["period"] == "all"}
    figures = ("dead_letters", "finished", "retries", "events", "rate", "reason")
    assert {place: tuple(r[n] for n in figures) for place, r in errors.items()} == {
        ("emails", ""): (0, 21, 1, None, 0.0, None),
        ("jobs", ""): (3, None, None, None, None, HOSTILE),
        ("visits", "counting"): (1, None, None, 4, 0.25, "odd"),
    }

    page = Page(out.read_text())
    text = "".join(page.text)
    assert page.tags["svg"] == 5  # published, finished, sessions, latency, errors
    assert not page.tags["script"]
    assert HOSTILE in text
    assert "\ufffd\ufffd日本 $\\frac{1}" in text
    assert "k" * 120 + "..." in text
    assert "\u202e" not in text
    assert out.stat().st_size < 100_000

    # Again, for less: the tables are of this report, not of both.
    again = report(
        dsn=bench.db.dsn, lake=lake, out=out, streams=["visits"], queues=["jobs"], since=at(1000),
        until=at(5001), top=1, spark=bench.spark,
    )  # fmt: skip
    assert [(r["name"], r["messages"]) for r in rows(lake, "throughput")] == [("visits", 1)] * 3
    assert [(r["key"], r["events"], r["rank"], r["run"]) for r in rows(lake, "keys")] == [
        (HOSTILE, 2, 1, again.id)
    ]
    assert rows(lake, "errors") == rows(lake, "latency") == []
    with pytest.raises(AlreadyExists, match=r"report_throughput .* is written by 'report.report'"):
        report(dsn=bench.db.dsn, lake=lake, out=out, name="other", spark=bench.spark)


def test_nothing_there_and_the_command_line(bench: Bench, tmp_path: Path) -> None:
    """No streams, no queues, no lake; then an empty stream; then one event."""
    cli, out = Cli(bench.db.dsn), tmp_path / "report.html"
    printed = cli("pipeline", "report", "--out", str(out))
    assert printed.startswith(f"report to {out}: 0 rows")
    page = Page(out.read_text())
    assert "There are no events." in page.text
    assert "There are no dead letters." in page.text
    assert page.tags["svg"] == 0
    bench.stream()
    bench.c.execute("select postbus.create_queue('jobs')")
    command = ("pipeline", "report", "orders", "--out", str(out))
    lake = ("--lake", str(tmp_path / "lake"), "--format", "iceberg")
    figures = cli.json(*command, *lake)
    assert (figures["rows"], figures["pipeline"], figures["state"]) == (0, "report", "done")
    bench.fill(1)
    assert cli.json(*command, *lake, "--since", "1h", "--top", "1")["rows"] == 1
    table = open_table(str(tmp_path / "lake"), "report_keys", format="iceberg", dsn=bench.db.dsn)
    assert [(r["key"], r["sessions"]) for r in table.read().to_pylist()] == [("k1", 1)]
    assert Page(out.read_text()).tags["svg"] == 2


def test_bad_input(db: Database, tmp_path: Path) -> None:
    c = db.connect()
    c.execute("select postbus.create_stream('orders')")
    open_table(str(tmp_path), "events").create(pa.schema({"id": pa.int64()}), writer="me")
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotFound, "no stream 'nope'.*There are: orders", {"streams": ["nope"]}),
        (NotFound, "no queue 'nope'", {"queues": ["nope"]}),
        (BadArgument, "since has no time zone", {"since": "2026-01-31"}),
        (BadArgument, "until is not a time", {"until": "tomorrow"}),
        (BadArgument, "is not before until", {"since": "1h", "until": "2h"}),
        (BadArgument, "bucket is not a time span", {"bucket": "often"}),
        (BadArgument, "bucket must be a second", {"bucket": 0.1}),
        (BadArgument, "session_gap must be longer than nothing", {"session_gap": 0}),
        (BadArgument, "top must be at least 1", {"top": 0}),
        (BadArgument, "out is a folder", {"out": tmp_path}),
        (BadArgument, "cannot write out", {"out": tmp_path / "no" / "report.html"}),
        (BadArgument, "table is given without a lake", {"table": "events"}),
        (NotFound, "there is no delta table nope.*archive first", {"lake": tmp_path, "table": "nope"}),
        (BadArgument, "events is not an archive: it has no column 'at'", {"lake": tmp_path}),
    ]
    for error, words, options in cases:
        with pytest.raises(error, match=f"(?s){words}"):
            report(dsn=db.dsn, **{"out": tmp_path / "report.html", **options})
    assert c.execute("select count(*) from postbus.list_runs()").fetchone() == (0,), "before the job starts"
