"""Check the SQL of the engine.

Usage: python tools/lint_sql.py [FILE ...]

- pglast: every statement and every PL/pgSQL body parses, by PostgreSQL's own parser;
- every SECURITY DEFINER function pins its search_path (two are excused, with the test that stands for them);
- pgspot: no security hole of the usual kinds (an unqualified name, an object made unsafely);
- squawk: column types and statements that one regrets later.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pglast
from pglast import ast

BIN = Path(sys.executable).parent
ENGINE = Path(__file__).resolve().parent.parent / "src" / "postbus" / "sql"

# Rules for migrations of large tables in use (the engine is installed into tables that are still empty), and
# for identifiers that could outgrow their type (the small integers of the engine are counts and lanes).
NOT_FOR_THE_ENGINE = (
    "adding-foreign-key-constraint",
    "ban-drop-column",
    "ban-drop-table",
    "constraint-missing-not-valid",
    "disallowed-unique-constraint",
    "prefer-bigint-over-int",
    "prefer-bigint-over-smallint",
    "prefer-robust-stmts",
    "require-concurrent-index-creation",
    "require-lock-timeout",
    "require-statement-timeout",
)

# A function without "security definer" has only the rights of its caller, so his search_path is his affair.
# Functions that lend rights are checked above; what remains is unsafe creation of objects.
SAFE_FOR_INVOKERS = tuple(f"--ignore={code}" for code in ("PS001", "PS003", "PS005", "PS016", "PS017"))

# Pins by naming, because SET costs too much there: docs/adr/0005-publish.md;
# tests/engine/test_search_path.py shows that it does.
PINNED_BY_NAMING = {"postbus._publish", "postbus._send"}

# pgspot cannot read a parsed body; what it looks for is the same in a quoted one. Nor does it see that a DO
# block makes the schema, after looking whose it is.
SCHEMA = "create schema postbus;\n"
PARSED_BODY = re.compile(r"^begin atomic\n(.*?);\nend;$", re.MULTILINE | re.DOTALL)

# The parser has no catalogue, so it cannot know the fields of a variable that has the type of a table.
FIELD_OF_A_ROW = re.compile(r'"\w+\.\w+" is not a known variable')


def parse(file: Path) -> list[str]:
    """Return what PostgreSQL's parser has against a file."""
    text = file.read_text()
    try:
        statements = pglast.parse_sql(text)
    except pglast.parser.ParseError as exc:
        where = exc.args[1] if len(exc.args) > 1 and isinstance(exc.args[1], int) else 0
        return [f"{file}:{_line(text, where)}: {exc.args[0]}"]
    problems = []
    for raw in statements:
        if not isinstance(raw.stmt, ast.CreateFunctionStmt):
            continue
        # Offsets count bytes, not characters.
        start = raw.stmt_location
        source = text.encode()[start : start + raw.stmt_len if raw.stmt_len else None].decode()
        name = ".".join(part.sval for part in raw.stmt.funcname)
        if _lends_rights(raw.stmt) and name not in PINNED_BY_NAMING and "set search_path" not in source:
            problems.append(f"{file}: {name} is SECURITY DEFINER and does not pin search_path")
        if "plpgsql" not in source.lower():
            continue
        try:
            pglast.parse_plpgsql(source)
        except pglast.parser.ParseError as exc:
            if FIELD_OF_A_ROW.match(exc.args[0]):
                continue
            line = _line(text, len(text.encode()[:start].decode())) + source[
                : len(source) - len(source.lstrip())
            ].count("\n")
            problems.append(f"{file}:{line}: in {name}: {exc.args[0]}")
    return problems


def _lends_rights(stmt: ast.CreateFunctionStmt) -> bool:
    return any(option.defname == "security" and option.arg.boolval for option in stmt.options or ())


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def main(names: list[str]) -> int:
    """Run the three checks on the named files, or on the whole engine."""
    files = [Path(name) for name in names] or sorted(ENGINE.rglob("*.sql"))
    if not files:
        print("no SQL to check")
        return 0
    problems = [problem for file in files for problem in parse(file)]
    print("\n".join(problems), end="\n" if problems else "")
    excluded = f"--exclude={','.join(NOT_FOR_THE_ENGINE)}"
    failed = bool(problems)
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / file.name for file in files]
        for file, copy in zip(files, copies, strict=True):
            text = PARSED_BODY.sub(r"as $$\n\1\n$$;", file.read_text())
            copy.write_text(SCHEMA + text if file == files[0] else text)
        tools = (
            [str(BIN / "pgspot"), "--append", "--no-plpgsql", *SAFE_FOR_INVOKERS, *map(str, copies)],
            [str(BIN / "squawk"), "--reporter=gcc", "--assume-in-transaction", excluded, *map(str, files)],
        )
        for command in tools:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                failed = True
                print(done.stdout + done.stderr)
    print(f"SQL: {len(files)} files {'with problems' if failed else 'checked'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
