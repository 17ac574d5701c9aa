"""The command line: a thin layer over the SQL functions.

Example:
    $ postbus install --dsn postgresql://localhost/shop
    $ postbus streams create orders --lanes 8
    $ postbus publish orders '{"id": 1}' --key customer-1
    $ postbus queues create emails
    $ postbus send emails '{"to": "someone@example.com"}'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from postbus import __version__
from postbus.cli import (
    _capture,
    _dlq,
    _engine,
    _finish,
    _groups,
    _keys,
    _look,
    _pipeline,
    _queues,
    _schedules,
    _streams,
    _topics,
)
from postbus.cli._connect import Dsn
from postbus.cli._consume import consume, tail
from postbus.cli._demo import demo
from postbus.cli._doctor import doctor
from postbus.cli._drain import drain
from postbus.cli._errors import Root, end_on_signals
from postbus.cli._maintain import maintain
from postbus.cli._publish import publish
from postbus.cli._receive import pop, receive
from postbus.cli._send import send, send_topic
from postbus.cli._status import status
from postbus.cli._top import top
from postbus.cli._worker import worker

app = typer.Typer(
    cls=Root,
    name="postbus",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def postbus(
    dsn: Dsn = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A message bus inside PostgreSQL.

    Every command works on the database of --dsn or $POSTBUS_DSN; without either on an embedded PostgreSQL.

    Example: postbus demo
    """


def _add(panel: str, *commands: Callable[..., None]) -> None:
    for command in commands:
        app.command(rich_help_panel=panel)(command)


_add("Engine", demo, _engine.install, _engine.upgrade, _engine.uninstall, _engine.sql, _engine.version)
app.add_typer(_streams.app, name="streams", rich_help_panel="Streams and groups")
app.add_typer(_groups.app, name="groups", rich_help_panel="Streams and groups")
_add("Streams and groups", _groups.seek, publish, consume, tail)
app.add_typer(_queues.app, name="queues", rich_help_panel="Queues")
_add("Queues", send, receive, pop, _look.peek, _look.cancel, drain, _look.archived)
app.add_typer(_keys.app, name="keys", rich_help_panel="Queues")
_add("Topics", _topics.bind, _topics.unbind, _topics.bindings, send_topic)
_add("Finishing messages", _finish.ack, _finish.nack, _finish.extend, _finish.dead_letter)
app.add_typer(_dlq.app, name="dlq", rich_help_panel="Finishing messages")
_add("Schedules", _schedules.schedule, _schedules.unschedule)
app.add_typer(_schedules.app, name="schedules", rich_help_panel="Schedules")
_add("Change capture", _capture.capture, _capture.uncapture, _capture.captures, _capture.backfill)
app.add_typer(_pipeline.app, name="pipeline", rich_help_panel="Pipelines")
_add("Workers", worker)
_add("Upkeep", status, top, doctor, _look.in_flight, _groups.pause, _groups.resume, maintain)


def main() -> None:
    """Run the command line; the entry point of ``postbus``."""
    end_on_signals()
    app()
