"""The engine itself: install, upgrade, uninstall, sql, version."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from postbus import __version__, engine
from postbus.cli._connect import Dsn, connect, value
from postbus.cli._print import done


def install(dsn: Dsn = None) -> None:
    """Install the engine, or bring the one that is there up to date. All data stay.

    Example: postbus install --dsn postgresql://localhost/shop
    """
    with connect(dsn, check=False) as conn:
        before = engine.install(conn)
        where = value(conn, "select current_database()")
    if before is None:
        done(f"installed postbus {__version__} in database {where}")
    elif before == __version__:
        done(f"postbus {__version__} was already installed in database {where}; it is complete")
    else:
        done(f"upgraded postbus from {before} to {__version__} in database {where}")


def upgrade(dsn: Dsn = None) -> None:
    """Bring an installed engine to the version of this package. All data stay.

    Example: postbus upgrade --dsn postgresql://localhost/shop
    """
    with connect(dsn, check=False) as conn:
        before = engine.upgrade(conn)
    done(
        f"postbus {__version__} was there already"
        if before == __version__
        else f"upgraded postbus from {before} to {__version__}"
    )


def uninstall(
    dsn: Dsn = None,
    force: Annotated[bool, typer.Option("--force", help="Yes, remove it with all its data.")] = False,
) -> None:
    """Remove the engine with every stream, queue, message, position and trigger.

    Example: postbus uninstall --force --dsn postgresql://localhost/shop
    """
    if not force:
        raise typer.BadParameter(
            "this removes every stream, queue, message, position and trigger; say --force if that is meant",
            param_hint="--force",
        )
    with connect(dsn, check=False) as conn:
        engine.uninstall(conn)
    done("postbus is gone from this database")


def sql() -> None:
    """Print the engine as one SQL file; running it installs or upgrades.

    Example: postbus sql | psql -v ON_ERROR_STOP=1 postgresql://localhost/shop
    """
    sys.stdout.write(engine.bundle())


def version() -> None:
    """Print the version of this package.

    Example: postbus version
    """
    done(__version__)
