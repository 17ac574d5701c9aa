"""Start, stop, warm start, settings, TCP, and errors that say what to do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psycopg
import pytest

from postbus.embedded import Server, find_binaries
from postbus.errors import EmbeddedError
from tests.embedded.conftest import alive


def value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def test_start_and_stop(data_dir: Path) -> None:
    with Server(data_dir) as server:
        assert server.running
        assert value(server.dsn, "select 1") == 1
        assert server.version.split()[0] == find_binaries().version
        assert value(server.dsn, "show server_encoding") == "UTF8"
        assert value(server.dsn, "show listen_addresses") == ""
        pid = server.pid
        assert alive(pid)
    assert not server.running
    assert not alive(pid)
    assert "database system is shut down" in server.log_path.read_text()


def test_the_directory_is_private(data_dir: Path) -> None:
    with Server(data_dir) as server:
        for path in (server.data_dir, server.socket_dir, server.data_dir / "data"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((server.data_dir / "password").stat().st_mode) == 0o600


def test_a_warm_start_keeps_the_data(data_dir: Path) -> None:
    server = Server(data_dir)
    with server, psycopg.connect(server.dsn) as conn:
        conn.execute("create table kept as select 42 as n")
    with server:
        assert value(server.dsn, "select n from kept") == 42
    with Server(data_dir) as again:
        assert value(again.dsn, "select n from kept") == 42


def test_start_twice_and_stop_twice_are_harmless(data_dir: Path) -> None:
    server = Server(data_dir)
    server.stop()
    assert server.start() is server
    pid = server.start().pid
    assert alive(pid)
    server.stop()
    server.stop()
    assert not alive(pid)


def test_settings_are_applied(data_dir: Path) -> None:
    settings = {"max_connections": 17, "fsync": False, "application_name": "it's a test"}
    with Server(data_dir, settings=settings) as server:
        assert value(server.dsn, "show max_connections") == "17"
        assert value(server.dsn, "show fsync") == "off"
        assert value(server.dsn, "select reset_val from pg_settings where name = 'application_name'")
    with Server(data_dir) as server:
        assert value(server.dsn, "show max_connections") == "100"
        assert value(server.dsn, "show fsync") == "on"


def test_a_bad_setting_says_so(data_dir: Path) -> None:
    server = Server(data_dir, settings={"max_connections": "many"})
    with pytest.raises(EmbeddedError, match="did not start") as caught:
        server.start()
    assert "max_connections" in caught.value.log
    assert caught.value.hint == "Correct the setting."
    assert not server.running


def test_a_temporary_server_leaves_nothing() -> None:
    with Server.temporary(settings={"max_connections": 20}) as server:
        path = server.data_dir
        assert value(server.dsn, "show fsync") == "off"
        assert value(server.dsn, "show max_connections") == "20"
        assert path.is_dir()
    assert not path.exists()
    with server:
        assert value(server.dsn, "select 1") == 1


def test_tcp_wants_the_password(data_dir: Path) -> None:
    with Server(data_dir, port=0) as server:
        assert value(server.tcp_dsn, "select 1") == 1
        assert value(server.dsn, "show listen_addresses") == "127.0.0.1"
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", password="wrong")
        with Server(data_dir, port=server.port) as same:
            assert same.pid == server.pid
        with pytest.raises(EmbeddedError, match="already runs on port"):
            Server(data_dir, port=server.port + 1).start()
        assert server.running
    with Server(data_dir) as server, pytest.raises(EmbeddedError, match="does not listen"):
        _ = server.tcp_dsn


def test_a_taken_port_says_so(data_dir: Path) -> None:
    with Server(data_dir, port=0) as first, pytest.raises(EmbeddedError, match="port is taken"):
        Server(data_dir.with_name("other"), port=first.port).start()


def test_a_long_path_gets_a_short_socket(data_dir: Path) -> None:
    deep = data_dir / ("d" * 60) / ("e" * 60)
    with Server(deep) as server:
        sockets = server.socket_dir
        assert not sockets.is_relative_to(deep)
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert value(server.dsn, "select 1") == 1
        with Server(deep) as same:
            assert same.pid == server.pid
    assert not sockets.exists()


def test_data_of_another_major_are_refused(data_dir: Path) -> None:
    (data_dir / "data").mkdir(parents=True)
    (data_dir / "data" / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(EmbeddedError, match=r"made by PostgreSQL 9\b") as caught:
        Server(data_dir).start()
    assert str(data_dir) in str(caught.value)
    assert "POSTBUS_PG_BIN" in (caught.value.hint or "")


def test_a_cluster_that_is_not_ours_is_left_alone(data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "PG_VERSION").write_text("15\n")
    with pytest.raises(EmbeddedError, match="did not make"):
        Server(data_dir).start()
    assert sorted(path.name for path in data_dir.iterdir()) == ["PG_VERSION"]


def test_a_directory_in_other_use_is_left_alone(data_dir: Path) -> None:
    data_dir.mkdir(mode=0o755)
    (data_dir / "letters").mkdir()
    with pytest.raises(EmbeddedError, match="holds other things"):
        Server(data_dir).start()
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o755
    assert [path.name for path in data_dir.iterdir()] == ["letters"]


def test_a_half_made_cluster_is_made_again(data_dir: Path) -> None:
    (data_dir / "data.new").mkdir(parents=True)
    (data_dir / "data.new" / "PG_VERSION").write_text("18\n")
    with Server(data_dir) as server:
        assert value(server.dsn, "select 1") == 1
    assert not (data_dir / "data.new").exists()


def test_a_directory_that_cannot_be_made_says_so(data_dir: Path) -> None:
    data_dir.write_text("a file is in the way")
    with pytest.raises(EmbeddedError, match="cannot use") as caught:
        Server(data_dir).start()
    assert "POSTBUS_HOME" in str(caught.value)


def test_the_default_directory_is_per_major(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_HOME", str(data_dir))
    with Server() as server:
        assert server.data_dir == data_dir / f"pg{find_binaries().major}"


def test_the_variables_of_libpq_do_not_confuse_the_server(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("PGPORT", "1")
    with Server(data_dir) as server:
        assert value(server.dsn, "show port") == "5432"


def test_facts_before_the_start_are_an_error() -> None:
    with pytest.raises(EmbeddedError, match="not running"):
        _ = Server.temporary().dsn


def test_a_forked_child_does_not_stop_the_server(data_dir: Path) -> None:
    with Server(data_dir) as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        os.waitpid(child, 0)
        assert server.running
        assert value(server.dsn, "select 1") == 1
