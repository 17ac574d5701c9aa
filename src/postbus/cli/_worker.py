"""``postbus worker``: runs the worker of an application."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postbus.cli._connect import Dsn
from postbus.errors import BadArgument

if TYPE_CHECKING:
    from postbus.worker import Worker

_LEVELS = ("debug", "info", "warning", "error")


def _level(value: str) -> str:
    if value.lower() not in _LEVELS:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(_LEVELS)}")
    return value.lower()


def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:WORKER", help="Where the worker is: app.jobs:worker.", show_default=False
        ),
    ],
    *,
    dsn: Dsn = None,
    name: Annotated[
        str | None,
        typer.Option(help="What it is called in the database; else host and process.", show_default=False),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for handlers to end after a signal.", show_default=False),
    ] = None,
    health: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Answer GET /healthz there, for probes.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="How many handlers run at a time in all.", show_default=False),
    ] = None,
    log_level: Annotated[
        str, typer.Option("--log-level", callback=_level, help=f"One of {', '.join(_LEVELS)}.")
    ] = "info",
) -> None:
    """Run the handlers of a worker until a signal comes.

    MODULE is imported from the current directory, or from wherever Python
    finds it; WORKER is the name of a Worker in it (default: worker).
    Options take the place of what the Worker was made with.

    The first SIGTERM or Ctrl-C drains: nothing more is begun, what was not
    begun is given back, and handlers at work have their grace to end. The
    exit code is then 0. The second one leaves at once.

    Example: postbus worker shop.jobs:worker --concurrency 20 --health 8080
    """
    from postbus.worker._worker import log_to_stderr

    found = load(target)
    if dsn is not None:
        found.dsn = dsn
    for option, value in (
        ("name", name),
        ("grace", grace),
        ("health", health),
        ("concurrency", concurrency),
    ):
        if value is not None:
            setattr(found, option, value)
    log_to_stderr(log_level.upper())
    with found.signals():
        asyncio.run(found.run())


def load(target: str) -> Worker:
    """The worker that ``module:name`` stands for.

    Raises:
        BadArgument: there is none, with a remedy.
    """
    from postbus.worker import Worker

    module_name, _, attribute = target.partition(":")
    attribute = attribute or "worker"
    path = Path(module_name)
    if path.suffix == ".py" or "/" in module_name:
        dotted = ".".join(path.with_suffix("").parts)
        raise BadArgument(
            f"{module_name!r} is a file, not a module", hint=f"postbus worker {dotted}:{attribute}"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise BadArgument(
            f"{module_name!r} is not the name of a module",
            hint="It reads MODULE:WORKER, for example: postbus worker shop.jobs:worker",
        )
    found: Any = _import(module_name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BadArgument(
                f"module {module_name!r} has no {attribute!r}", hint=_workers_of(module_name)
            ) from None
    if not isinstance(found, Worker):
        kind = type(found).__name__
        raise BadArgument(f"{target} is a {kind}, not a Worker", hint=_workers_of(module_name))
    return found


def _import(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            raise BadArgument(
                f"there is no module {exc.name!r} in {here}, nor anywhere else that Python looks",
                hint="Call it from the directory that holds the module or package, or install that.",
            ) from None
        raise BadArgument(
            f"module {name!r} needs {exc.name!r}, which is not there ({_where(exc)})",
            hint="Install it into the environment that postbus runs in.",
        ) from None
    except Exception as exc:
        raise BadArgument(
            f"module {name!r} cannot be imported: {type(exc).__name__}: {exc} ({_where(exc)})",
            hint=f"See the whole of it: python -c 'import {name}'",
        ) from None


def _where(exc: BaseException) -> str:
    """The line of the application that failed."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    frame = (ours or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _workers_of(module_name: str) -> str:
    from postbus.worker import Worker

    names = [n for n, value in vars(sys.modules[module_name]).items() if isinstance(value, Worker)]
    if names:
        return "It has " + ", ".join(f"{module_name}:{n}" for n in names) + "."
    return "Make one at the top level of the module: worker = Worker()."
