"""``postbus top``: queues and groups as they are now, again and again."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import psycopg
import typer
from psycopg.conninfo import make_conninfo
from rich.live import Live
from rich.text import Text

from postbus.cli._connect import Dsn, connect, with_defaults
from postbus.cli._print import console, notes
from postbus.cli._samples import Sample, Sampler
from postbus.cli._screen import Frame, screen
from postbus.engine import Connection

# Where nobody's screen sets the limit.
_WIDTH = 100
# How much of the past sparklines show, in samples.
_KEEP = 300
# The least that libpq takes.
_CONNECT_SECONDS = 2

# Waits for so many seconds; true: leave.
Wait = Callable[[float], bool]


def top(
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long from one screen to the next.")
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="End after so many screens.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per sample, line by line.")
    ] = False,
    dsn: Dsn = None,
) -> None:
    """Show queues and groups live: depth, rates, ages, what is out, dead letters, lag.

    q or Ctrl-C leaves. Where the output is no terminal it prints one screen, or --count of them.
    A server that is restarted is waited for.

    Example: postbus top --every 2

    Example: postbus top --json --count 60 | jq '.queues[] | {queue, depth}'
    """
    live = not as_json and sys.stdout.isatty()
    with connect(dsn) as conn:
        source = _Source(conn)
        if as_json:
            _print_json(source, every, count)
        elif live:
            _show(source, every, count)
        else:
            _print_plain(source, every, count or 1)


class _Source:
    """Samples from one server, over another connection when the first is gone."""

    def __init__(self, conn: Connection) -> None:
        self.sampler = Sampler(_KEEP)
        self.trouble: str | None = None
        self._seen = False
        # A pooler may hand each statement to another session.
        conn.prepare_threshold = None
        self._conn: Connection | None = conn
        same = make_conninfo(**conn.info.get_parameters(), password=conn.info.password or None)
        self._dsn = make_conninfo(with_defaults(same), connect_timeout=_CONNECT_SECONDS)

    def read(self) -> Sample | None:
        """The next sample; None while the server is away, with the reason in `trouble`."""
        try:
            if self._conn is None:
                self._conn = psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None)
                self.sampler.forget()
            sample = self.sampler.read(self._conn)
        except psycopg.Error as exc:
            # What goes wrong later may pass: a queue that was dropped while it was counted.
            if not self._seen and not isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError):
                raise
            text = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            if self._conn is None or self._conn.closed:
                self.close()
                text = f"reconnecting: {text}"
            self.trouble = text
            return None
        self.trouble = None
        self._seen = True
        return sample

    def close(self) -> None:
        """Close the connection; the next `read` makes another one."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def _samples(source: _Source, every: float, count: int | None, wait: Wait) -> Iterator[Sample | None]:
    """One sample after the other, None for those that were not to be had."""
    due = time.monotonic()
    left = count
    while True:
        sample = source.read()
        yield sample
        if left is not None and sample is not None:
            left -= 1
            if left == 0:
                return
        # What came late is not made up for.
        due = max(due + every, time.monotonic())
        if wait(due - time.monotonic()):
            return


def _show(source: _Source, every: float, count: int | None) -> None:
    out = console()
    last: Sample | None = None
    with _keys() as wait, Live(console=out, screen=True, auto_refresh=False) as live:
        for sample in _samples(source, every, count, wait):
            last = sample or last
            frame = Frame(out.width, out.height, utf8=_utf8(out.encoding))
            if last is None:
                live.update(Text(source.trouble or ""), refresh=True)
            else:
                live.update(screen(last, source.sampler, frame, source.trouble), refresh=True)


def _print_plain(source: _Source, every: float, count: int) -> None:
    out = console()
    frame = Frame(_WIDTH, None, utf8=_utf8(out.encoding))
    for sample in _reported(source, every, count):
        out.print(screen(sample, source.sampler, frame))
        sys.stdout.flush()


def _print_json(source: _Source, every: float, count: int | None) -> None:
    for sample in _reported(source, every, count):
        print(json.dumps(sample.as_json(), ensure_ascii=False), flush=True)


def _reported(source: _Source, every: float, count: int | None) -> Iterator[Sample]:
    """Samples for a program; that the server is away is said on stderr, once each time."""
    away = False
    for sample in _samples(source, every, count, _sleep):
        if sample is not None:
            yield sample
        elif not away:
            notes().print(f"postbus: {source.trouble}", markup=False, soft_wrap=True)
        away = sample is None


def _utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "") == "utf8"


def _sleep(seconds: float) -> bool:
    time.sleep(max(0.0, seconds))
    return False


@contextmanager
def _keys() -> Iterator[Wait]:
    """Wait for time or for the key that leaves. Ctrl-C stays a signal."""
    try:
        import termios
        import tty
    except ImportError:  # not a Unix
        termios = None  # type: ignore[assignment]
    if termios is None or not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    was = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSADRAIN)
    try:
        yield lambda seconds: _pressed(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, was)


def _pressed(fd: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
        typed = os.read(fd, 64)
        if not typed or b"q" in typed.lower():
            return True
    return False
