"""Connections as users have them: each driver and framework behind the few verbs that a test needs.

Asynchronous ones are driven from here by a loop of their own, so that one test serves all.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import asyncpg
import django
import django.conf
import psycopg
import sqlalchemy
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row, scalar_row
from psycopg.types.json import set_json_loads
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_asyncio

from postbus.client._foreign import fetch, fetch_async

Rows = list[tuple[Any, ...]]

if not django.conf.settings.configured:
    django.conf.settings.configure(USE_TZ=False)  # times of Django's own cursors have no zone then
    django.setup()


def parts_of(dsn: str) -> dict[str, str]:
    return {key: str(value) for key, value in conninfo_to_dict(dsn).items()}


class Caller:
    """A connection of the user's. `conn` is what he hands to Postbus."""

    conn: Any

    def __init__(self, dsn: str) -> None:
        self._stack = ExitStack()
        self.open(parts_of(dsn), dsn)

    def open(self, parts: dict[str, str], dsn: str) -> None:
        raise NotImplementedError

    def fetch(self, query: str, *params: object) -> Rows:
        return fetch(self.conn, query, params)

    def own(self, statement: str) -> None:
        """Run a statement as the user does without Postbus."""
        self.conn.execute(statement)

    def commit(self) -> None:
        self.conn.commit()

    def rollback(self) -> None:
        self.conn.rollback()

    def close(self) -> None:
        self._stack.close()


class Psycopg(Caller):
    def open(self, parts: dict[str, str], dsn: str) -> None:
        self.conn = self._stack.enter_context(psycopg.connect(dsn))
        self._stack.callback(self.conn.rollback)


class PsycopgSetUp(Psycopg):
    """Rows as dictionaries, everything prepared, odd formats, JSON loaded in a way of its own."""

    def open(self, parts: dict[str, str], dsn: str) -> None:
        super().open(parts, dsn)
        self.conn.row_factory = dict_row
        self.conn.prepare_threshold = 0
        self.conn.execute("set datestyle = 'German'")
        self.conn.execute("set intervalstyle = 'iso_8601'")
        self.conn.execute("set timezone = 'Asia/Kolkata'")
        self.conn.commit()
        set_json_loads(lambda data: f"loaded {data!r}", self.conn)


class PsycopgCursor(Psycopg):
    def open(self, parts: dict[str, str], dsn: str) -> None:
        super().open(parts, dsn)
        self._connection = self.conn
        self.conn = psycopg.ClientCursor(self._connection, row_factory=scalar_row)

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


def sa_engine(dialect: str, parts: dict[str, str]) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(
        f"postgresql+{dialect}://",
        connect_args=parts,
        poolclass=sqlalchemy.NullPool,
        json_deserializer=lambda text: f"loaded {text!r}",
    )


class SaConnection(Caller):
    dialect = "psycopg"

    def open(self, parts: dict[str, str], dsn: str) -> None:
        engine = sa_engine(self.dialect, parts)
        self.conn = self._stack.enter_context(engine.connect())

    def own(self, statement: str) -> None:
        self.conn.execute(sqlalchemy.text(statement))


class SaSession(SaConnection):
    def open(self, parts: dict[str, str], dsn: str) -> None:
        engine = sa_engine(self.dialect, parts)
        self.conn = self._stack.enter_context(orm.Session(engine))


class SaScopedSession(SaConnection):
    def open(self, parts: dict[str, str], dsn: str) -> None:
        engine = sa_engine(self.dialect, parts)
        self.conn = orm.scoped_session(orm.sessionmaker(engine))
        self._stack.callback(self.conn.remove)


class SaPsycopg2(SaSession):
    dialect = "psycopg2"


class Psycopg2(Caller):
    def open(self, parts: dict[str, str], dsn: str) -> None:
        import psycopg2
        import psycopg2.extras

        self.conn = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.DictCursor)
        self._stack.callback(self.conn.close)
        psycopg2.extras.register_default_jsonb(self.conn, loads=lambda text: text)

    def own(self, statement: str) -> None:
        with self.conn.cursor() as cur:
            cur.execute(statement)


def django_handler(parts: dict[str, str]) -> ConnectionHandler:
    return ConnectionHandler(
        {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts["dbname"],
                "HOST": parts["host"],
                "PORT": parts["port"],
                "USER": parts["user"],
            }
        }
    )


class Django(Caller):
    """``connections["x"]``."""

    def open(self, parts: dict[str, str], dsn: str) -> None:
        handler = django_handler(parts)
        self.conn = self.wrapper = handler["default"]
        self.proxy = ConnectionProxy(handler, "default")
        self.wrapper.set_autocommit(False)
        self._stack.callback(self.wrapper.close)

    def own(self, statement: str) -> None:
        with self.wrapper.cursor() as cur:
            cur.execute(statement)

    def commit(self) -> None:
        self.wrapper.commit()

    def rollback(self) -> None:
        self.wrapper.rollback()


class DjangoProxy(Django):
    """``django.db.connection``."""

    def open(self, parts: dict[str, str], dsn: str) -> None:
        super().open(parts, dsn)
        self.conn = self.proxy


class DjangoCursor(Django):
    def open(self, parts: dict[str, str], dsn: str) -> None:
        super().open(parts, dsn)
        self.conn = self._stack.enter_context(self.wrapper.cursor())


class AsyncCaller(Caller):
    """The same for asynchronous connections."""

    def open(self, parts: dict[str, str], dsn: str) -> None:
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._exits = AsyncExitStack()
        self._stack.callback(lambda: self.run(self._exits.aclose()))
        self.run(self.aopen(parts, dsn))

    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def fetch(self, query: str, *params: object) -> Rows:
        rows: Rows = self.run(fetch_async(self.conn, query, params))
        return rows

    def own(self, statement: str) -> None:
        self.run(self.conn.execute(statement))

    def commit(self) -> None:
        self.run(self.conn.commit())

    def rollback(self) -> None:
        self.run(self.conn.rollback())


class AsyncPsycopg(AsyncCaller):
    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        conn = await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row)
        self.conn = await self._exits.enter_async_context(conn)
        self._exits.push_async_callback(conn.rollback)


class AsyncPsycopgCursor(AsyncPsycopg):
    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        await super().aopen(parts, dsn)
        self._connection = self.conn
        self.conn = self._connection.cursor()

    def commit(self) -> None:
        self.run(self._connection.commit())

    def rollback(self) -> None:
        self.run(self._connection.rollback())


def asyncpg_parts(parts: dict[str, str]) -> dict[str, Any]:
    return {
        "host": parts["host"],
        "port": int(parts["port"]),
        "user": parts["user"],
        "database": parts["dbname"],
    }


class Asyncpg(AsyncCaller):
    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        self.conn = await asyncpg.connect(**asyncpg_parts(parts))
        self._exits.push_async_callback(self.conn.close)
        await self._begin()

    async def _begin(self) -> None:
        self._transaction = self.conn.transaction()
        await self._transaction.start()

    async def _end(self, verb: str) -> None:
        await getattr(self._transaction, verb)()
        await self._begin()

    def commit(self) -> None:
        self.run(self._end("commit"))

    def rollback(self) -> None:
        self.run(self._end("rollback"))


class AsyncpgPool(Asyncpg):
    """A connection of a pool, without cached statements, that decodes JSON itself."""

    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        pool = asyncpg.create_pool(
            **asyncpg_parts(parts), min_size=1, max_size=1, statement_cache_size=0, init=self._set_up
        )
        await self._exits.enter_async_context(pool)
        self.conn = await self._exits.enter_async_context(pool.acquire())
        await self._begin()

    @staticmethod
    async def _set_up(conn: Any) -> None:
        for name in ("json", "jsonb"):
            await conn.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


class SaAsyncConnection(AsyncCaller):
    dialect = "psycopg"

    def engine(self, parts: dict[str, str]) -> sa_asyncio.AsyncEngine:
        return sa_asyncio.create_async_engine(
            f"postgresql+{self.dialect}://",
            connect_args=asyncpg_parts(parts) if self.dialect == "asyncpg" else parts,
            poolclass=sqlalchemy.NullPool,
            json_deserializer=lambda text: f"loaded {text!r}",
        )

    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        self.conn = await self._exits.enter_async_context(self.engine(parts).connect())

    def own(self, statement: str) -> None:
        self.run(self.conn.execute(sqlalchemy.text(statement)))


class SaAsyncpgConnection(SaAsyncConnection):
    dialect = "asyncpg"


class SaAsyncSession(SaAsyncConnection):
    async def aopen(self, parts: dict[str, str], dsn: str) -> None:
        self.conn = await self._exits.enter_async_context(sa_asyncio.AsyncSession(self.engine(parts)))


class SaAsyncpgSession(SaAsyncSession):
    dialect = "asyncpg"


class SaRunSync(SaAsyncpgSession):
    """``await session.run_sync(work)``: the sync function on a session that is async underneath."""

    def fetch(self, query: str, *params: object) -> Rows:
        rows: Rows = self.run(self.conn.run_sync(lambda session: fetch(session, query, params)))
        return rows


SYNC: list[Callable[[str], Caller]] = [
    Psycopg, PsycopgSetUp, PsycopgCursor, SaConnection, SaSession, SaScopedSession, Django, DjangoProxy,
    DjangoCursor,
]  # fmt: skip
ASYNC: list[Callable[[str], Caller]] = [
    AsyncPsycopg, AsyncPsycopgCursor, Asyncpg, AsyncpgPool, SaAsyncConnection, SaAsyncpgConnection,
    SaAsyncSession, SaAsyncpgSession, SaRunSync,
]  # fmt: skip
if importlib.util.find_spec("psycopg2"):
    SYNC += [Psycopg2, SaPsycopg2]
