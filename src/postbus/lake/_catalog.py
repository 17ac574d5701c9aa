"""The catalog of Iceberg tables: two tables of pyiceberg's in the schema ``postbus_lake``."""

from __future__ import annotations

import time

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import create_engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from postbus.errors import BadArgument, PostbusError

SCHEMA = "postbus_lake"
NAME = NAMESPACE = "postbus"


def catalog_url(dsn: str) -> str:
    """The URL of the catalog for SQLAlchemy, to be used as ``uri`` of a pyiceberg catalog of type sql.

    Raises:
        BadArgument: the DSN does not parse.
    """
    try:
        known = {k: str(v) for k, v in conninfo_to_dict(dsn).items() if v is not None}
    except psycopg.Error as exc:
        raise BadArgument(f"option dsn is not a connection string: {exc}") from exc
    known["options"] = f"{known.get('options', '')} -c search_path={SCHEMA}".strip()
    known.setdefault("application_name", "postbus lake")
    known.setdefault("connect_timeout", "10")
    return URL.create("postgresql+psycopg", query=known).render_as_string(hide_password=False)


def open_catalog(dsn: str, again: int = 5) -> SqlCatalog:
    """The catalog, made when it is missing."""
    url = catalog_url(dsn)
    connected = False
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            connected = True
            # One at a time, until this connection is closed: two that create it would trip over each other.
            conn.execute("select pg_advisory_lock(hashtextextended('postbus_lake', 0))")
            if conn.execute("select to_regnamespace(%s)", [SCHEMA]).fetchone() == (None,):
                conn.execute(f"create schema {SCHEMA}")
            catalog = SqlCatalog(NAME, **{"uri": url, "py-io-impl": "postbus.lake._io.SyncedFileIO"})
            catalog.engine.dispose()
            # No pool: a catalog is asked seldom, and by processes that are killed.
            catalog.engine = create_engine(url, poolclass=NullPool)
            if not catalog.namespace_exists(NAMESPACE):
                catalog.create_namespace(NAMESPACE)
            return catalog
    except (psycopg.Error, SQLAlchemyError) as exc:
        if connected and again > 0 and isinstance(exc, psycopg.OperationalError | OperationalError):
            # The server was there a moment ago: somebody ended the connection, or restarts it.
            time.sleep(0.5)
            return open_catalog(dsn, again - 1)
        raise PostbusError(
            "the catalog of Iceberg tables in Postgres cannot be opened",
            detail=str(exc).partition("\n[SQL")[0].strip(),
            hint=f"Check option dsn; its user needs the right to create the schema {SCHEMA}, or to use it and"
            " its tables.",
        ) from exc
