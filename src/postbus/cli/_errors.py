"""How commands end: errors become one line and a hint on stderr, never a traceback.

Exit codes: 0 it worked, 1 the engine or the server said no, 2 wrong usage; 128 + n when a signal ended it
(130 for Ctrl-C), as shells count. `postbus doctor` has 1 for warnings (with --strict) and 2 for failures.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import psycopg
import typer
from rich.text import Text
from typer.core import TyperGroup

from postbus.cli._completion import attach
from postbus.cli._print import notes
from postbus.errors import PostbusError, from_psycopg

_CHECK_DSN = "Check that the server runs and that the DSN (--dsn or $POSTBUS_DSN) names it."
_HINTS = {
    "28000": "Check the user and the password in the DSN, and the server's pg_hba.conf.",
    "28P01": "Check the user and the password in the DSN.",
    "3D000": "Check the database name in the DSN (--dsn or $POSTBUS_DSN).",
    "42501": "This role may not do that: use the role that installed Postbus, or ask it for access.",
    "42883": "The engine in this database may be older than this package: postbus upgrade.",
}


class Ended(KeyboardInterrupt):
    """A signal asks to end; a kind of Ctrl-C, so that drivers cancel what they do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Root(TyperGroup):
    """The top of the command line; everything that goes wrong below ends here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self)

    def invoke(self, ctx: Any) -> Any:
        """Run the command and turn what it raises into an exit code."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except PostbusError as exc:
            _fail(exc.message, exc.detail, exc.hint)
        except psycopg.Error as exc:
            _fail(*explain(exc))
        except BrokenPipeError:
            _forget_stdout()
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except KeyboardInterrupt as exc:
            raise typer.Exit(128 + getattr(exc, "number", signal.SIGINT)) from None
        except OSError as exc:
            _fail(str(exc), None, None)
        return result


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, so that commands clean up behind them."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Ended(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def explain(exc: psycopg.Error) -> tuple[str, str | None, str | None]:
    """The message, detail and hint of an error of the driver or the server."""
    ours = from_psycopg(exc)
    if ours is not None:
        return ours.message, ours.detail, ours.hint
    text = exc.diag.message_primary or str(exc).strip() or type(exc).__name__
    # Ours first: to a function that is missing the server says something about type casts.
    hint = _HINTS.get(exc.sqlstate or "") or exc.diag.message_hint
    if hint is None and isinstance(exc, psycopg.OperationalError):
        hint = _connection_hint(text)
    elif hint is None and exc.sqlstate is None:
        hint = "A DSN reads postgresql://user:password@host:5432/database, or host=... dbname=... user=..."
    return text, exc.diag.message_detail, hint


def _connection_hint(text: str) -> str:
    """Connecting fails without an SQLSTATE: what the server said is in the text alone."""
    if "authentication" in text or "no password" in text or "pg_hba" in text:
        return _HINTS["28000"]
    if "role" in text and "does not exist" in text:
        return _HINTS["28P01"]
    if "database" in text and "does not exist" in text:
        return _HINTS["3D000"]
    return _CHECK_DSN


def _fail(message: str, detail: str | None, hint: str | None) -> NoReturn:
    err = notes()
    err.print(Text.assemble(("error: ", "bold red"), message.rstrip()), soft_wrap=True)
    if detail:
        err.print(Text(detail.rstrip()), soft_wrap=True)
    if hint:
        err.print(Text.assemble(("hint: ", "cyan"), hint), soft_wrap=True)
    raise typer.Exit(1)


def _forget_stdout() -> None:
    """Nobody reads any more: what is still buffered must not fail again when the interpreter ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    finally:
        os.close(null)
