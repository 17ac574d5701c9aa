"""docs/reference and the engine, the command line and the error classes agree."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from postbus import errors
from postbus.cli import app
from tests.conftest import Database
from tests.docs.pages import ROOT, Section, pages, sections

REFERENCE = ROOT / "docs" / "reference"
_FUNCTION = re.compile(r"`(\w+)`")
# How PostgreSQL spells it, and how people do.
_TYPES = [
    ("timestamp with time zone", "timestamptz"),
    ("integer", "int"),
    ("double precision", "float8"),
    ("TABLE(", "table ("),
    ("SETOF ", "setof "),
]
_DEFAULT = re.compile(r" DEFAULT (NULL|'[^']*'|\w+)(::[\w. ]+(\[\])?)?")


def documented() -> dict[str, Section]:
    """The sections of the reference that have a signature, by function."""
    found: dict[str, Section] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for section in sections(page):
            name = _FUNCTION.fullmatch(section.title)
            if name:
                assert name[1] not in found, f"{section.where}: {name[1]} is documented twice"
                found[name[1]] = section
    return found


def signatures(section: Section) -> set[str]:
    blocks = [b for b in section.blocks if b.language == "text" and "signature" in b.words]
    return {" ".join(part.split()) for block in blocks for part in re.split(r"\n(?=postbus\.)", block.text)}


def in_database(db: Database) -> dict[str, set[str]]:
    query = """select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
        from pg_proc p where p.pronamespace = 'postbus'::regnamespace and p.proname !~ '^_'"""
    found: dict[str, set[str]] = defaultdict(set)
    for name, arguments, result in db.connect().execute(query):
        text = "postbus.{}({}) returns {}".format(name, _DEFAULT.sub(r" = \1", arguments), result)
        for theirs, ours in _TYPES:
            text = text.replace(theirs, ours)
        found[name].add(text.replace("= NULL", "= null"))
    return found


def test_every_public_function_is_documented_as_it_is(db: Database) -> None:
    there, here = in_database(db), documented()
    assert sorted(set(there) - set(here)) == [], "without a heading in docs/reference"
    assert sorted(set(here) - set(there)) == [], "documented, but not in the database"
    for name, section in here.items():
        assert signatures(section) == there[name], f"{section.where}: the signatures of {name}"


def test_every_argument_is_explained(db: Database) -> None:
    query = """select p.proname, array(select a.name from unnest(p.proargnames, p.proargmodes) a (name, mode)
          where coalesce(a.mode, 'i') in ('i', 'b', 'v'))
        from pg_proc p where p.pronamespace = 'postbus'::regnamespace and p.proname !~ '^_'"""
    here = documented()
    for name, arguments in db.connect().execute(query):
        missing = [a for a in arguments if f"`{a}`" not in here[name].text]
        assert missing == [], f"{here[name].where}: {name} says nothing about"


def test_every_function_has_an_example() -> None:
    without = [
        s.where
        for name, s in documented().items()
        if not any(b.language == "sql" and f"postbus.{name}" in b.text for b in s.blocks)
    ]
    assert without == []


def test_functions_that_the_pages_call_exist(db: Database) -> None:
    """Also in prose: nobody is sent to a function that is not there."""
    there = in_database(db)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        called = set(re.findall(r"\bpostbus\.([a-z]\w*)\(", text))
        unknown = sorted(called - set(there) - {"group"})
        assert unknown == [], f"{page.relative_to(ROOT)} calls"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command of the command line, ``postbus streams`` and ``postbus streams create`` alike."""
    children = getattr(command, "commands", {})
    if not children or (command.invoke_without_command and path):
        yield " ".join(("postbus", *path)), command
    for name, child in children.items():
        yield from commands(child, (*path, name))


def test_every_command_is_documented() -> None:
    there = dict(commands(typer.main.get_command(app)))
    here = {s.title.strip("`"): s for s in sections(REFERENCE / "cli.md") if s.title.startswith("`postbus ")}
    assert sorted(set(there) - set(here)) == [], "without a heading in cli.md"
    assert sorted(set(here) - set(there)) == [], "documented, but no command"
    for name, command in there.items():
        options = [o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        missing = [o for o in options if o not in ("--dsn", "--help") and f"`{o}`" not in here[name].text]
        assert missing == [], f"{here[name].where}: {name} says nothing about"


@pytest.mark.parametrize("error", errors.PostbusError.__subclasses__(), ids=lambda e: e.__name__)
def test_every_error_is_documented(error: type[errors.PostbusError]) -> None:
    text = (REFERENCE / "upkeep.md").read_text(encoding="utf-8")
    if error.code is not None:
        assert f"| `{error.code}` |" in text
        assert f"`{error.__name__}`" in text
