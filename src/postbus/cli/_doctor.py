"""``postbus doctor``: is the server fit for this, and is anything wrong with the bus?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import psycopg
import typer
from rich.text import Text

from postbus.cli._checks import Finding
from postbus.cli._connect import Dsn, Json, connect
from postbus.cli._errors import explain
from postbus.cli._print import console, visible
from postbus.cli._probes import run

_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there are warnings.")] = False,
    as_json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Check the server and the bus: settings, LISTEN, clocks, old snapshots, bloat, missing upkeep.

    Each finding comes with its remedy. Exits with 2 if something fails, and with --strict with 1 if there
    are warnings.

    Example: postbus doctor --dsn postgresql://localhost/shop
    """
    found = []
    out = console()
    for finding in _findings(dsn):
        found.append(finding)
        if not as_json:
            out.print(_line(finding), soft_wrap=True)
            if finding.remedy:
                out.print(Text.assemble("      remedy: ", (visible(finding.remedy), "cyan")), soft_wrap=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2, ensure_ascii=False))
    levels = Counter(finding.level for finding in found)
    if not as_json:
        out.print(f"{levels['ok']} ok, {levels['warn']} warnings, {levels['fail']} failures", markup=False)
    if levels["fail"]:
        raise typer.Exit(2)
    if strict and levels["warn"]:
        raise typer.Exit(1)


def _line(finding: Finding) -> Text:
    level = (f"{finding.level:<4}  ", _STYLES[finding.level])
    return Text.assemble(level, f"{finding.check:<12}", visible(finding.message))


def _findings(dsn: str | None) -> Iterator[Finding]:
    with ExitStack() as stack:
        try:
            conn = stack.enter_context(connect(dsn, check=False))
        except psycopg.OperationalError as exc:
            message, _, hint = explain(exc)
            yield Finding("connect", "fail", message.splitlines()[0], hint)
            return
        # A pooler may hand each statement to another session.
        conn.prepare_threshold = None
        yield from run(conn)
