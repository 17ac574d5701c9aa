"""Several users of one directory, and what remains when they are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from postbus.embedded import Server
from tests.embedded.conftest import Holder, alive, wait_until

Hold = Callable[..., Holder]


def test_a_second_process_shares_the_server(data_dir: Path, hold: Hold) -> None:
    other = hold(data_dir)
    with Server(data_dir) as server:
        assert server.pid == other.server_pid
        psycopg.connect(server.dsn).close()
    assert alive(other.server_pid), "others still use it"
    other.end()
    assert not alive(other.server_pid)


def test_the_server_outlives_the_process_that_started_it(data_dir: Path, hold: Hold) -> None:
    starter = hold(data_dir)
    with Server(data_dir) as server, psycopg.connect(server.dsn) as conn:
        starter.kill()
        assert conn.execute("select 1").fetchone() == (1,)
        assert server.running
    assert not alive(starter.server_pid)


def test_many_who_start_at_once_get_one_server(data_dir: Path, hold: Hold) -> None:
    with ThreadPoolExecutor(4) as pool:
        holders = list(pool.map(lambda _: hold(data_dir), range(4)))
    assert len({holder.server_pid for holder in holders}) == 1


@pytest.mark.fault
def test_kill_9_of_the_holder_leaves_no_server(data_dir: Path, hold: Hold) -> None:
    holder = hold(data_dir)
    holder.kill()
    assert wait_until(lambda: not alive(holder.server_pid))
    assert "database system is shut down" in (data_dir / "server.log").read_text()


@pytest.mark.fault
def test_kill_9_of_the_holder_leaves_no_temporary_directory(hold: Hold) -> None:
    holder = hold("temporary")
    assert holder.data_dir.exists()
    holder.kill()
    assert wait_until(lambda: not alive(holder.server_pid) and not holder.data_dir.exists())


@pytest.mark.fault
def test_kill_9_of_the_supervisor_leaves_no_server(data_dir: Path, hold: Hold) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("only Linux tells a child of the death of its parent")
    holder = hold(data_dir)
    stat = Path(f"/proc/{holder.server_pid}/stat").read_text()
    supervisor = int(stat.rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    assert wait_until(lambda: not alive(holder.server_pid))
    assert "database system is shut down" in (data_dir / "server.log").read_text()
    with Server(data_dir) as server:
        psycopg.connect(server.dsn).close()


@pytest.mark.fault
def test_kill_9_of_the_server_is_recovered(data_dir: Path) -> None:
    server = Server(data_dir).start()
    with psycopg.connect(server.dsn) as conn:
        conn.execute("create table kept as select 42 as n")
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not server.running)
    assert (data_dir / "data" / "postmaster.pid").exists()
    with server:
        assert server.pid != pid
        with psycopg.connect(server.dsn) as conn:
            assert conn.execute("select n from kept").fetchone() == (42,)


def test_a_postmaster_pid_that_now_belongs_to_a_stranger(data_dir: Path) -> None:
    with Server(data_dir) as server:
        text = (data_dir / "data" / "postmaster.pid").read_text()
    (data_dir / "data" / "postmaster.pid").write_text(text.replace(text.split()[0], str(os.getpid()), 1))
    with server:
        psycopg.connect(server.dsn).close()


def test_stop_waits_only_for_a_server_that_stops(data_dir: Path) -> None:
    first, second = Server(data_dir).start(), Server(data_dir).start()
    first.stop()
    assert not first.running
    assert second.running
    psycopg.connect(second.dsn).close()
    second.stop()


def test_start_while_the_last_user_leaves(data_dir: Path) -> None:
    for _ in range(3):
        server = Server(data_dir).start()
        server._let_go()
        with Server(data_dir) as successor:
            psycopg.connect(successor.dsn).close()
