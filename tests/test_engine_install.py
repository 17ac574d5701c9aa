"""Installing, upgrading and removing the engine: safe to repeat, to race, and to do under load."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postbus import NotFound, WrongVersion, __version__, engine
from postbus.embedded import find_binaries
from tests.conftest import Database, run_sql

NEWER = "999.0.0"


def fingerprint(conn: psycopg.Connection[Any]) -> list[Any]:
    """Every object of the schema with its definition, but for those whose names count up."""
    return conn.execute(
        """
        select 'function', p.oid::regprocedure::text, md5(pg_get_functiondef(p.oid)) from pg_proc p
        where p.pronamespace = 'postbus'::regnamespace and p.prokind = 'f' and p.proname !~ '_\\d+_\\d+$'
        union all
        select 'relation', c.relname::text, c.relkind::text from pg_class c
        where c.relnamespace = 'postbus'::regnamespace
        union all
        select 'column', a.attrelid::regclass::text, a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'postbus'::regnamespace and a.attnum > 0 order by 1, 2, 3
        """
    ).fetchall()


def consume(conn: psycopg.Connection[Any], group: str, max: int = 100) -> list[Any]:
    return conn.execute(
        "select id, payload, receipt from postbus.consume('s', %s, %s)", (group, max)
    ).fetchall()


def drain(conn: psycopg.Connection[Any], group: str) -> list[str]:
    payloads = []
    while taken := consume(conn, group):
        payloads += [row[1] for row in taken]
        conn.execute("select postbus.ack(%s::text[])", ([row[2] for row in taken],))
    return payloads


def prepare(conn: psycopg.Connection[Any], *groups: str, lanes: int = 1) -> None:
    conn.execute("select postbus.create_stream('s', jsonb_build_object('lanes', %s::int))", (lanes,))
    for group in groups:
        conn.execute("select postbus.create_group('s', %s)", (group,))


def set_version(conn: psycopg.Connection[Any], version: str) -> None:
    conn.execute("update postbus.meta set version = %s", (version,))


def test_install_returns_what_was_there(emptydb: Database) -> None:
    conn = emptydb.connect()
    assert engine.installed_version(conn) is None
    assert engine.install(conn) is None
    assert engine.installed_version(conn) == engine.check(conn) == __version__
    assert engine.install(conn) == __version__


def test_install_again_changes_no_object(db: Database) -> None:
    conn = db.connect()
    prepare(conn, "g")
    before = fingerprint(conn)
    engine.install(conn)
    assert fingerprint(conn) == before


def test_install_again_keeps_events_positions_and_leases(db: Database) -> None:
    conn = db.connect()
    prepare(conn, "half", "late")
    conn.execute("select postbus.publish_batch('s', array(select g::text from generate_series(1, 10) g))")
    first = consume(conn, "half", 4)
    conn.execute("select postbus.ack(%s::text[])", ([row[2] for row in first[:3]],))
    conn.execute("select postbus.publish('s', 'later', deliver_at => now() + interval '1 hour')")
    conn.execute("select postbus.publish('s', 'once', dedupe_key => 'k')")
    once = conn.execute("select postbus.publish('s', 'twice', dedupe_key => 'k')").fetchone()

    engine.install(conn)

    assert conn.execute("select postbus.publish('s', 'thrice', dedupe_key => 'k')").fetchone() == once
    assert consume(conn, "half") == []  # the one unfinished message holds the only lane
    assert conn.execute("select postbus.ack(%s::text[])", ([first[3][2]],)).fetchone() == (1,)
    assert drain(conn, "half") == ["5", "6", "7", "8", "9", "10", "once"]
    assert drain(conn, "late") == [*map(str, range(1, 11)), "once"]
    assert conn.execute("select scheduled from postbus.list_streams()").fetchone() == (1,)


@pytest.mark.parametrize("path", ["psql", "driver"])
def test_bundle_runs_as_one_file(emptydb: Database, path: str, tmp_path: Any) -> None:
    conn = emptydb.connect()
    file = tmp_path / "postbus.sql"
    file.write_text(engine.bundle())
    for _ in range(2):
        if path == "psql":
            psql = shutil.which("psql") or shutil.which("psql", path=find_binaries().bindir)
            if psql is None:
                pytest.skip("no psql here")
            # Without ON_ERROR_STOP psql goes on after an error, and only stderr tells.
            command = [psql, "-X", "-q", "-d", emptydb.dsn, "-f", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stderr == ""
        else:
            conn.execute(file.read_bytes())
        assert engine.check(conn) == __version__
    prepare(conn, "g")
    conn.execute("select postbus.publish('s', 'x')")
    assert [row[1] for row in consume(conn, "g")] == ["x"]


def test_bundle_and_install_make_the_same(emptydb: Database, db: Database) -> None:
    conn = emptydb.connect()
    conn.execute(engine.bundle().encode())
    assert fingerprint(conn) == fingerprint(db.connect())


def test_ten_installs_at_once_end_as_one(emptydb: Database) -> None:
    barrier = threading.Barrier(10)

    def one() -> str | None:
        with psycopg.connect(emptydb.dsn, autocommit=True) as conn:
            barrier.wait()
            return engine.install(conn)

    with ThreadPoolExecutor(10) as pool:
        before = Counter(future.result() for future in [pool.submit(one) for _ in range(10)])
    assert before == {None: 1, __version__: 9}
    assert engine.check(emptydb.connect()) == __version__


def test_newer_engine_is_left_alone(db: Database) -> None:
    conn = db.connect()
    before = fingerprint(conn)
    set_version(conn, NEWER)
    for call in (engine.install, engine.upgrade, engine.check):
        with pytest.raises(WrongVersion) as caught:
            call(conn)
        assert caught.value.sqlstate == "PB008"
        assert NEWER in caught.value.message
        assert "pip install --upgrade postbus" in (caught.value.hint or "")
    with pytest.raises(psycopg.Error) as raised:
        conn.execute(engine.bundle().encode())
    assert raised.value.sqlstate == "PB008"
    conn.execute("rollback")
    assert engine.installed_version(conn) == NEWER
    assert fingerprint(conn) == before


def test_versions_are_compared_as_numbers(db: Database) -> None:
    conn = db.connect()
    major, minor, *_ = engine._key(__version__)
    set_version(conn, f"{major}.{minor + 10}.0")
    with pytest.raises(WrongVersion):
        engine.install(conn)


def test_check_asks_for_an_upgrade_of_an_older_engine(db: Database) -> None:
    conn = db.connect()
    set_version(conn, "0.0.9")
    with pytest.raises(WrongVersion) as caught:
        engine.check(conn)
    assert "postbus upgrade" in (caught.value.hint or "")


def test_upgrade_records_the_new_version_and_keeps_data(db: Database) -> None:
    conn = db.connect()
    prepare(conn, "g")
    conn.execute("select postbus.publish('s', 'before')")
    set_version(conn, "0.0.9")
    installed_at = conn.execute("select installed_at from postbus.meta").fetchone()
    assert engine.upgrade(conn) == "0.0.9"
    assert engine.check(conn) == __version__
    assert conn.execute(
        "select installed_at from postbus.meta where upgraded_at > installed_at"
    ).fetchone() == (installed_at)
    assert [row[1] for row in consume(conn, "g")] == ["before"]


def test_upgrade_check_and_uninstall_need_an_engine(emptydb: Database) -> None:
    conn = emptydb.connect()
    for call in (engine.upgrade, engine.check, engine.uninstall):
        with pytest.raises(NotFound):
            call(conn)


def test_uninstall_leaves_nothing(db: Database) -> None:
    conn = db.connect()
    prepare(conn, "g")
    conn.execute("create table orders (id int)")
    conn.execute(
        "create function postbus.probe() returns trigger language plpgsql as 'begin return new; end'"
    )
    conn.execute(
        "create trigger postbus_probe after insert on orders for each row execute function postbus.probe()"
    )
    engine.uninstall(conn)
    assert engine.installed_version(conn) is None
    assert conn.execute("select count(*) from pg_trigger where not tgisinternal").fetchone() == (0,)
    assert conn.execute("select to_regnamespace('postbus')").fetchone() == (None,)
    conn.execute("insert into orders values (1)")
    assert engine.install(conn) is None


def test_owner_of_the_database_can_install(emptydb: Database, server_dsn: str) -> None:
    role = f"owner_of_{emptydb.name}"
    run_sql(server_dsn, "create role {} login", role)
    try:
        run_sql(server_dsn, "alter database {} owner to {}", emptydb.name, role)
        conn = emptydb.connect(user=role)
        row = conn.execute("select rolsuper from pg_roles where rolname = current_user").fetchone()
        assert row == (False,)
        assert engine.install(conn) is None
        prepare(conn, "g", lanes=2)
        conn.execute("select postbus.publish('s', 'x')")
        assert [m[1] for m in consume(conn, "g")] == ["x"]
        conn.execute("select * from postbus.maintain()")
        assert engine.install(conn) == __version__
        engine.uninstall(conn)
    finally:
        emptydb.close()
        run_sql(emptydb.dsn, "drop owned by {}", role)
        owner = conninfo_to_dict(server_dsn)["user"]
        run_sql(server_dsn, "alter database {} owner to {}", emptydb.name, str(owner))
        run_sql(server_dsn, "drop role {}", role)


def test_a_reader_can_ask_for_the_version(db: Database, server_dsn: str) -> None:
    role = f"reader_of_{db.name}"
    run_sql(server_dsn, "create role {} login in role postbus_reader", role)
    try:
        assert engine.check(db.connect(user=role)) == __version__
    finally:
        db.close()
        run_sql(server_dsn, "drop role {}", role)


class Load:
    """Publishers and consumers in threads, until told to stop."""

    def __init__(self, dsn: str) -> None:
        self.dsn = make_conninfo(dsn, application_name="load")
        self.stop = threading.Event()
        self.published: list[int] = []
        self.acked: list[int] = []
        self.errors: list[str] = []
        self.threads = [
            threading.Thread(target=self._run, args=(body,)) for body in (self._publish, self._consume) * 3
        ]

    def _run(self, body: Any) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                body(conn)
        except psycopg.Error as exc:
            self.errors.append(f"{exc.sqlstate} {exc}")

    def _publish(self, conn: psycopg.Connection[Any]) -> None:
        while not self.stop.is_set():
            with conn.transaction():
                for key in "abcd":
                    row = conn.execute("select postbus.publish('s', 'x', key => %s)", (key,)).fetchone()
                    assert row is not None
                    self.published.append(row[0])

    def _consume(self, conn: psycopg.Connection[Any]) -> None:
        n = 0
        while True:
            last_round = self.stop.is_set()
            taken = consume(conn, "g", 20)
            n += 1
            if taken and n % 5 == 0:
                conn.execute("select postbus.nack(%s::text[], interval '0')", ([row[2] for row in taken],))
                continue
            if taken:
                conn.execute("select postbus.ack(%s::text[])", ([row[2] for row in taken],))
                self.acked.extend(row[0] for row in taken)
            elif last_round:
                return

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)


def test_install_under_load_disturbs_nobody(db: Database) -> None:
    conn = db.connect()
    prepare(conn, lanes=4)
    conn.execute("""select postbus.create_group('s', 'g', '{"lease": 60, "max_attempts": 1000}')""")
    with Load(db.dsn) as load:
        for _ in range(5):
            threading.Event().wait(0.2)
            assert engine.install(conn) == __version__
            conn.execute("select * from postbus.maintain()")
    assert load.errors == []
    deadline = 100
    while deadline and set(load.acked) != set(load.published):
        deadline -= 1
        threading.Event().wait(0.1)
        for row in consume(conn, "g", 1000):
            conn.execute("select postbus.ack(%s::text[])", ([row[2]],))
            load.acked.append(row[0])
    assert len(load.published) > 100
    assert set(load.acked) == set(load.published)


def test_install_does_not_wait_for_open_transactions(db: Database) -> None:
    conn = db.connect()
    prepare(conn, "g")
    for _ in range(3):
        # Consumers of a stream that is just made touch its row.
        conn.execute("select * from postbus.maintain()")
    conn.execute("select postbus.publish('s', 'x')")
    busy = db.connect(autocommit=False)
    busy.execute("select postbus.publish('s', 'y', dedupe_key => 'k')")
    busy.execute("select postbus.publish('s', 'z', deliver_at => now() + interval '1 hour')")
    receipts = [row[2] for row in consume(busy, "g")]
    busy.execute("select postbus.dead_letter(%s::text[])", (receipts,))
    engine.install(conn, timeout=0)
    busy.commit()
    assert drain(conn, "g") == ["y"]


def test_install_gives_up_where_a_lock_is_not_to_be_had(db: Database) -> None:
    conn = db.connect()
    prepare(conn)
    busy = db.connect(autocommit=False)
    busy.execute("select * from postbus.stream for update")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        engine.install(conn, timeout=0)
    threading.Timer(0.7, busy.rollback).start()
    assert engine.install(conn) == __version__


def test_install_leaves_the_settings_of_the_callers_transaction(emptydb: Database) -> None:
    conn = emptydb.connect(autocommit=False)
    conn.execute("set lock_timeout = '7s'")
    engine.install(conn)
    assert conn.execute("show lock_timeout").fetchone() == ("7s",)
    assert conn.execute("show client_min_messages").fetchone() == ("notice",)


def test_sql_files_are_in_order_and_named() -> None:
    names = [name for name, _ in engine.sql_files()]
    assert names == sorted(names)
    assert all(name[:2].isdigit() for name in names)
    text = engine.bundle()
    assert all(text.count(f"-- {name}\n") == 1 for name in names)
    assert sql.SQL(text).as_string(None) == text
