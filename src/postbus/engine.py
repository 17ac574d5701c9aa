"""Installing the engine: the SQL files of this package, applied in one transaction.

Example:
    >>> import psycopg
    >>> from postbus import engine
    >>> with psycopg.connect(dsn) as conn:  # doctest: +SKIP
    ...     engine.install(conn)
"""

from __future__ import annotations

import random
import re
import time
from importlib import resources
from typing import Any

import psycopg

from postbus._version import __version__
from postbus.errors import NotFound, WrongVersion, translated

Connection = psycopg.Connection[Any]

_HEADER = """\
-- Postbus {version}: the engine as one file. Run it with psql -v ON_ERROR_STOP=1 -f; running it again keeps
-- all data. Installs run one at a time, and an engine newer than this file is left alone. Where it cannot
-- have a lock at once it gives up and changes nothing, rather than make producers and consumers queue behind
-- it: then run it again.
"""

_PRELUDE = """\
select pg_advisory_xact_lock(1886351991);
set local client_min_messages = warning;
set local lock_timeout = '500ms';
do $guard$
declare
  v_there text;
begin
  if to_regclass('postbus.meta') is null then
    return;
  end if;
  execute 'select version from postbus.meta' into v_there;
  if string_to_array(substring(v_there from '^[0-9.]*[0-9]'), '.')::int[]
      > string_to_array('{release}', '.')::int[] then
    raise exception using errcode = 'PB008',
      message = format('the engine in this database is version %s, newer than {version}', v_there),
      hint = 'Upgrade the postbus package: pip install --upgrade postbus.';
  end if;
end
$guard$;
"""

_EPILOGUE = """\
-- Readers are generated for each stream: make new ones under the next ring. Sessions in the middle of a call
-- find those of the last one still there.
update postbus.stream s set ring = s.ring + 1;
select postbus._stamp(s.id), postbus._make_readers(s.id) from postbus.stream s;
insert into postbus.meta (version) values ('{version}')
on conflict (singleton) do update set version = excluded.version, upgraded_at = clock_timestamp();
"""

# CREATE INDEX IF NOT EXISTS locks the table against writers before it looks whether the index is there: under
# load that stalls consumers and deadlocks with them. Look first.
_INDEX = re.compile(r"^create (unique )?index if not exists (\w+)\s+on ([^;]+);", re.MULTILINE)
_GUARDED = r"""do $index$ begin if to_regclass('postbus.\2') is null then
  create \1index \2 on \3;
end if; end $index$;"""


def sql_files() -> list[tuple[str, str]]:
    """The engine's files by name and text, in the order they are applied."""
    folder = resources.files("postbus").joinpath("sql")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [(f.name, f.read_text(encoding="utf-8")) for f in files]


def _body() -> str:
    release = ".".join(map(str, _key(__version__)))
    parts = [_PRELUDE.format(version=__version__, release=release)]
    parts += [f"-- {name}\n{_INDEX.sub(_GUARDED, text)}" for name, text in sql_files()]
    parts.append(_EPILOGUE.format(version=__version__))
    return "\n".join(parts)


def bundle() -> str:
    """The whole engine as one SQL script, for ``psql -f``."""
    header = _HEADER.format(version=__version__)
    return f"{header}begin isolation level read committed;\n{_body()}commit;\n"


def installed_version(conn: Connection) -> str | None:
    """The version of the engine in the database, or None where there is none."""
    row = conn.execute("select to_regclass('postbus.meta') is not null").fetchone()
    if row is None or not row[0]:
        return None
    row = conn.execute("select postbus.version()").fetchone()
    return None if row is None or row[0] is None else str(row[0])


def install(conn: Connection, *, timeout: float = 60.0) -> str | None:
    """Install or upgrade the engine in one transaction, keeping all data.

    Safe to repeat, to run from many places at once, and to run under load: where a lock is not to be had at
    once, everything is rolled back and tried again, for `timeout` seconds. Returns the version that was
    there before.

    Raises:
        WrongVersion: the engine in the database is newer than this package.
        psycopg.errors.LockNotAvailable: a transaction that stays open is in the way.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with translated(), conn.transaction():
                return _install(conn)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - not a secret


def _install(conn: Connection) -> str | None:
    conn.execute("select pg_advisory_xact_lock(1886351991)")
    before = installed_version(conn)
    names = ("lock_timeout", "client_min_messages")
    was = [(name, conn.execute("select current_setting(%s)", (name,)).fetchone()) for name in names]
    conn.execute(_body().encode())
    # What the script set would last until the end of a transaction that the caller began.
    for name, row in was:
        conn.execute("select set_config(%s, %s, true)", (name, row[0] if row else None))
    return before


def upgrade(conn: Connection) -> str:
    """Bring an installed engine to this package's version; returns the version that was there.

    Raises:
        NotFound: there is no engine in the database.
        WrongVersion: it is newer than this package.
    """
    if installed_version(conn) is None:
        raise NotFound("there is no postbus engine in this database", hint="Install it: postbus install.")
    before = install(conn)
    assert before is not None
    return before


def check(conn: Connection) -> str:
    """Return the engine's version if this package can work with it.

    Raises:
        NotFound: there is no engine in the database.
        WrongVersion: the engine and this package do not fit together.
    """
    there = installed_version(conn)
    if there is None:
        raise NotFound("there is no postbus engine in this database", hint="Install it: postbus install.")
    if _key(there) > _key(__version__):
        raise WrongVersion(
            f"the engine in this database is version {there}, this package is {__version__}",
            hint="Upgrade the package: pip install --upgrade postbus.",
        )
    if _key(there)[:2] < _key(__version__)[:2]:
        raise WrongVersion(
            f"the engine in this database is version {there}, this package is {__version__}",
            hint="Upgrade the engine: postbus upgrade.",
        )
    return there


def uninstall(conn: Connection) -> None:
    """Remove the engine with everything in it: streams, events, positions, triggers.

    Raises:
        NotFound: there is no engine in the database.
    """
    with translated(), conn.transaction():
        conn.execute("select pg_advisory_xact_lock(1886351991)")
        if installed_version(conn) is None:
            raise NotFound("there is no postbus engine in this database")
        conn.execute("select postbus.uninstall()")


def _key(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 0.10.1rc2 is (0, 10, 1)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
