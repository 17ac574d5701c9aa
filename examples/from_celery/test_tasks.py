"""Tests: what was CELERY_TASK_ALWAYS_EAGER is a real worker on a real database."""

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from postbus import Bus, Worker

from .bridge import Tasks
from .tasks import Fetch, worker


@pytest.fixture
def fetches(bus: Bus) -> Any:
    return bus.queue("fetch", Fetch, create=True)


def test_one_step_after_the_other(fetches: Any, drain: Any, postbus_dsn: str) -> None:
    fetches.send(Fetch(url="https://example.com/a"))
    assert {h.message.source for h in drain(worker)} == {"fetch", "scale"}
    with psycopg.connect(postbus_dsn) as conn:
        assert conn.execute("select * from picture").fetchall() == [(1, "https://example.com/a", 200)]


def test_retry_and_reject(fetches: Any, drain: Any, clock: Any, dead_letters: Any) -> None:
    fetches.send(Fetch(url="https://example.com/busy"))
    fetches.send(Fetch(url="https://example.com/gone"))
    assert {h.outcome for h in drain(worker)} == {"retried", "dead"}
    [letter] = dead_letters("fetch")
    assert letter.reason == "there is no such picture"
    clock.move(minutes=10)
    [again] = drain(worker)
    assert again.message.attempt == 2


def test_the_time_of_beat(fetches: Any, drain: Any, clock: Any) -> None:
    clock.set(datetime(2030, 1, 1, 1, 59, 30, tzinfo=UTC))  # in Zurich it is one hour later
    assert drain(worker) == []  # the schedule is made
    clock.move(minutes=1)
    assert {h.message.source for h in drain(worker)} == {"cron.nightly", "fetch", "scale"}


def test_the_bridge(bus: Bus, drain: Any, clock: Any) -> None:
    added: list[int] = []
    worker = Worker()
    tasks = Tasks(worker, bus)

    @tasks.task
    def add(a: int, b: int = 1) -> None:
        added.append(a + b)

    bus.queue("tasks", create=True)
    add.delay(1)
    add.apply_async((2,), {"b": 2}, countdown=60)
    drain(worker)
    clock.move(minutes=1)
    drain(worker)
    assert added == [2, 4]
