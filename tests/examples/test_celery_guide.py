"""What was a Celery application: docs/guide/celery.md."""

from __future__ import annotations

import psycopg
import pytest

from examples.from_celery.bridge import Tasks
from postbus import Bus, Worker
from postbus.testing import Assertions, drain, url
from tests.conftest import Database
from tests.examples.running import run_tests, running, until


@pytest.fixture
def dsn(server_dsn: str, db: Database) -> str:
    return url(server_dsn, db.name)


def test_its_own_tests(server_dsn: str) -> None:
    assert run_tests("examples/from_celery", server_dsn) == 4


def test_the_worker_as_a_process(dsn: str, db: Database) -> None:
    conn = db.connect()
    conn.execute("create table picture (id serial primary key, source text, width int)")
    with Bus(dsn) as bus, running("examples.from_celery.tasks", POSTBUS_DSN=dsn):
        bus.queue("fetch", create=True).send({"url": "https://example.com/a"})
        until(lambda: conn.execute("select width from picture").fetchall() == [(200,)])
    assert conn.execute("select name, cron from postbus.list_schedules()").fetchall() == [
        ("nightly", "0 3 * * *")
    ]


def test_the_bridge_in_a_transaction(dsn: str) -> None:
    """What Celery cannot do: a task that is part of the caller's transaction."""
    worker = Worker()
    done = []
    with Bus(dsn) as bus, psycopg.connect(dsn) as conn:
        bus.queue("tasks", create=True)
        tasks = Tasks(worker, bus)

        @tasks.task
        def note(text: str) -> None:
            done.append(text)

        note("directly")
        note.apply_async(("rolled back",), conn=conn)
        conn.rollback()
        note.apply_async(("committed",), conn=conn)
        conn.commit()
        drain(worker, dsn)
    assert done == ["directly", "committed"]


def test_a_task_that_nobody_knows(dsn: str) -> None:
    """While tasks move over, an older worker may get one that it does not have: it comes again."""
    worker = Worker()
    with Bus(dsn) as bus:
        Tasks(worker, bus)
        bus.queue("tasks", create=True).send({"args": [], "kwargs": {}}, type="shop.tasks.new")
        with pytest.raises(KeyError, match="new"):
            drain(worker, dsn)
        Assertions(dsn).assert_sent("tasks", type="shop.tasks.new")
