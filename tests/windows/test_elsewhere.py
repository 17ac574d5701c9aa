"""Windows on a replica, and after the database has moved to another cluster."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from postbus.embedded import Server
from postbus.engine import install
from tests.conftest import SERVER_SETTINGS, fast_directory
from tests.stress.sessions import publish, stream, value, wait_for
from tests.stress.test_restore import clusters, copy, new_database, tool  # noqa: F401 - a fixture
from tests.windows.reading import bound, count, plan, position, read, window


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """A primary and its replica."""
    base = tool("pg_basebackup")
    with (
        Server.temporary(settings=SERVER_SETTINGS, inside=fast_directory()) as primary,
        tempfile.TemporaryDirectory(dir=fast_directory()) as folder,
    ):
        with psycopg.connect(primary.dsn, autocommit=True) as c:
            install(c)
        home = Path(folder) / "replica"
        home.mkdir(mode=0o700)
        (home / "password").write_text("not used")
        data = home / "data"
        command: list[str | Path] = [base, "-d", primary.dsn, "-D", data, "-R", "-c", "fast", "-X", "stream"]
        subprocess.run(command, check=True, capture_output=True)
        with Server(home, settings={**SERVER_SETTINGS, "hot_standby": "on"}) as replica:
            yield primary, replica


def test_a_replica_reads_windows(pair: tuple[Server, Server]) -> None:
    primary, replica = pair
    with (
        psycopg.connect(primary.dsn, autocommit=True) as c,
        psycopg.connect(replica.dsn, autocommit=True) as r,
    ):
        stream(c, lanes=2)
        at = position(c, "earliest")
        publish(c, "a")
        publish(c, "b")
        now = position(c, holder="me")
        wait_for(lambda: value(r, "select count(*) from postbus.stream") == 1, "stream on the replica")
        parts = [part for part, _ in plan(c, at, now, 2)]
        assert [p for part in parts for _, p in read(r, part)] == ["a", "b"]
        assert position(r) == now, "the newest tick that it has; it cuts none"
        assert count(r, at, now) == 2
        assert window(r, at, bound(r, at, now, 1, "me")) == ["a"]
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            r.execute("select postbus.follow_group('s', 'g', %s)", [now])


def test_a_replica_waits_for_the_tick(pair: tuple[Server, Server]) -> None:
    primary, replica = pair
    with (
        psycopg.connect(primary.dsn, autocommit=True) as c,
        psycopg.connect(replica.dsn, autocommit=True) as r,
        psycopg.connect(replica.dsn, autocommit=True) as control,
    ):
        stream(c, "behind")
        at = position(c, of="behind")
        known = "select count(*) from postbus.stream where name = 'behind'"
        wait_for(lambda: value(r, known) == 1, "stream on the replica")
        control.execute("select pg_wal_replay_pause()")
        paused = "select pg_get_wal_replay_pause_state()"
        wait_for(lambda: value(control, paused) == "paused", "pause")
        try:
            publish(c, "x", to="behind")
            ((part, _),) = plan(c, at, position(c, of="behind"), of="behind")
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has not come to tick"):
                r.execute(
                    "select * from postbus.read_window('behind', %s, wait => '50 milliseconds')", [part]
                )
            got: list[tuple[int, str]] = []
            reader = threading.Thread(target=lambda: got.extend(read(r, part, "behind")))
            reader.start()
            waiting = "select count(*) from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
            wait_for(lambda: value(control, waiting, r.info.backend_pid) == 1, "wait for the tick")
        finally:
            control.execute("select pg_wal_replay_resume()")
        reader.join(20)
        assert [p for _, p in got] == ["x"]


def test_windows_span_eras(clusters: tuple[Server, Server]) -> None:  # noqa: F811
    high, low = clusters
    source, target, third = (
        new_database(server, f"windows_{i}") for i, server in enumerate((high, low, high))
    )
    with psycopg.connect(source, autocommit=True) as c, psycopg.connect(source) as open_:
        install(c)
        stream(c, lanes=2)
        first = position(c, holder="me")
        for i in range(5):
            publish(c, f"a{i}")
        publish(open_, "never committed")
        middle = position(c, holder="me")
        for i in range(5):
            publish(c, f"b{i}")
        copy(source, target)
        publish(c, "after the dump")
        gone = position(c, holder="me")
    with psycopg.connect(target, autocommit=True) as c:
        for i in range(5):
            publish(c, f"c{i}")
        now = position(c, holder="me")
        assert json.loads(now)["era"] == 2
        everything = [f"{x}{i}" for x in "abc" for i in range(5)]
        assert window(c, first, now, 3) == everything
        assert window(c, middle, now, 3) == everything[5:]
        with pytest.raises(psycopg.Error) as e:
            plan(c, gone, now)
        assert e.value.sqlstate == "PB005"
        # In steps; and once more into another cluster, with upkeep in between.
        at, got = first, []
        while at != now:
            until = bound(c, at, now, 4, "me")
            got += window(c, at, until)
            at = until
        assert got == everything
        assert count(c, first, now) == 15
        copy(target, third)
    with psycopg.connect(third, autocommit=True) as c:
        for _ in range(5):
            publish(c, "d")
            c.execute("select * from postbus.maintain()")
        assert window(c, first, position(c), 5) == [*everything, *["d"] * 5]
        assert window(c, now, position(c), 5) == ["d"] * 5
