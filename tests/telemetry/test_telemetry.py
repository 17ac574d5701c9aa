"""The context travels in the headers; spans of producer, wait and consumer; metrics; or nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postbus import Bus
from tests.conftest import Database

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def run(*args: str) -> Any:
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def traced(db: Database) -> Any:
    return run("-m", "tests.telemetry.traced", db.dsn)


def named(traced: Any, name: str) -> list[dict[str, Any]]:
    return [s for s in traced["spans"] if s["name"] == name]


def test_spans_of_producer_wait_and_consumer_are_one_trace(traced: Any) -> None:
    [request] = named(traced, "request")
    one, batch = named(traced, "send emails")
    assert {s["kind"] for s in (one, batch)} == {"PRODUCER"}
    assert one["parent"] == batch["parent"] == request["id"]
    assert batch["attributes"]["messaging.batch.message_count"] == 2

    handled = named(traced, "process emails")
    waits = named(traced, "wait emails")
    assert len(handled) == len(waits) == 4  # three messages, one of them twice
    assert {s["kind"] for s in handled} == {"CONSUMER"}
    assert {s["trace"] for s in handled + waits} == {request["trace"]}
    assert sorted(s["parent"] for s in handled) == sorted(s["parent"] for s in waits)
    assert [s["parent"] for s in handled].count(batch["id"]) == 2
    assert all(s["seconds"] >= 0 for s in waits)
    # What the handler does is inside.
    assert sorted(s["parent"] for s in named(traced, "inside")) == sorted(s["id"] for s in handled)


def test_a_failure_is_seen_and_the_attempt_is_named(traced: Any) -> None:
    handled = named(traced, "process emails")
    [failed] = [s for s in handled if s["status"] == "ERROR"]
    assert failed["attributes"]["postbus.message.attempt"] == 1
    assert failed["attributes"]["messaging.destination.name"] == "emails"
    again = [s for s in handled if s["attributes"]["postbus.message.attempt"] == 2]
    assert [s["attributes"]["messaging.message.id"] for s in again] == [
        failed["attributes"]["messaging.message.id"]
    ]


def test_headers_carry_the_context_beside_those_of_the_user(traced: Any) -> None:
    first = next(s for s in traced["seen"] if s["headers"].get("mine") == "yes")
    assert first["headers"]["traceparent"].startswith("00-")


def test_metrics_of_the_process_and_of_the_database(traced: Any) -> None:
    metrics = traced["metrics"]

    def total(name: str) -> int:
        return sum(p["value"] for p in metrics[name])

    assert total("postbus.message.sent_total") == 3
    assert total("postbus.message.acked_total") == 3
    assert total("postbus.message.nacked_total") == 1
    assert sum(p["count"] for p in metrics["postbus.processing_latency_seconds"]) == 4
    assert sum(p["sum"] for p in metrics["postbus.batch.size"]) == 4
    depth = metrics["postbus.queue.depth"]
    assert {p["attributes"]["queue"] for p in depth} == {"emails"}


def test_without_a_provider_nothing_is_added(db: Database) -> None:
    with Bus(db.dsn) as bus:
        queue = bus.queue("q", create=True)
        queue.send(1)
        [m] = queue.receive().messages
        assert m.headers == {}


def test_without_the_package_everything_works(db: Database) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from postbus import Bus\n"
        f"with Bus({db.dsn!r}) as bus:\n"
        "    q = bus.queue('q', create=True); q.send(1)\n"
        "    print([m.payload for m in q.messages(wait=0)])\n"
    )
    assert run("-c", code) == [1]
