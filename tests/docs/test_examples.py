"""Every example of the documentation runs, each page on a fresh database and in the order of the page.

- ``sql``: one statement after the other on one connection, in autocommit mode. ``--> 1 | text`` after a
  statement is a row that it returns, ``...`` in it stands for anything; ``error=PB004`` in the fence is how
  the last statement of the block fails.
- ``console``: the lines that begin with ``$ postbus``; what stands below them is what they print. ``RECEIPT``
  in a command is the receipt that the last ``postbus receive`` printed.
- ``python``: run in one namespace per page, with ``POSTBUS_DSN`` in the environment. ``# --> 1`` behind an
  expression is what its value looks like. With
  ``file=examples/...`` in the fence it does not run here: it is a part of that file, line by line, and the
  file has tests of its own in tests/examples. ``...`` on a line of its own stands for lines left out.
- ``text``: cannot run here, or is no example.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from postbus.cli import app
from tests.conftest import Database
from tests.docs.pages import ROOT, Block, blocks, pages, statements

RUN = {"sql", "console", "python"}
# Its commands take minutes and start servers of their own.
NOT_RUN = ROOT / "docs" / "benchmarks.md"
PAGES = [page for page in pages() if page != NOT_RUN and any(b.language in RUN for b in blocks(page))]


class Player:
    """Plays the blocks of one page on one database."""

    def __init__(self, db: Database) -> None:
        self.dsn = db.dsn
        self.conn = db.connect()
        self.names: dict[str, Any] = {"__name__": "__example__", "__expect__": expect_value}
        self.receipt = "RECEIPT"

    def play(self, block: Block) -> None:
        match block.language:
            case _ if block.option("file") is not None:
                excerpt(block)
            case "sql":
                self.sql(block)
            case "console":
                self.console(block)
            case "python":
                tree = with_expectations(block)
                # Our __future__ is not theirs.
                code = compile(tree, str(block.page), "exec", dont_inherit=True)
                exec(code, self.names)

    def sql(self, block: Block) -> None:
        state = block.option("error")
        todo = list(statements(block))
        for statement in todo:
            where = f"{block.page.relative_to(ROOT)}:{statement.line}"
            try:
                cursor = self.conn.execute(statement.text.encode())
            except psycopg.Error as exc:
                if statement is todo[-1] and exc.sqlstate == state:
                    return
                pytest.fail(f"{where}: {exc.sqlstate} {exc}", pytrace=False)
            if statement.rows:
                expect(where, list(statement.rows), rows(cursor))
        if state is not None:
            pytest.fail(f"{block.where}: the last statement should fail with {state}", pytrace=False)

    def console(self, block: Block) -> None:
        for line, command, printed in commands(block):
            where = f"{block.page.relative_to(ROOT)}:{line}"
            program, *args = shlex.split(command, comments=True)
            assert program == "postbus", f"{where}: only postbus runs here, mark the block as text"
            args = [self.receipt if arg == "RECEIPT" else arg for arg in args]
            result = CliRunner().invoke(app, args, env={"POSTBUS_DSN": self.dsn})
            assert result.exit_code == 0, f"{where}: exit code {result.exit_code}\n{result.output}"
            if args[0] == "receive" and result.stdout:
                self.receipt = result.stdout.split()[0]
            if printed:
                expect(where, printed, [" ".join(text.split()) for text in result.stdout.splitlines()])


def excerpt(block: Block) -> None:
    """Check that the block is a part of the file it names."""
    file = ROOT / str(block.option("file"))
    assert file.is_file(), f"{block.where}: there is no {block.option('file')}"
    lines, at = file.read_text(encoding="utf-8").splitlines(), 0
    for piece in re.split(r"^\.\.\.\n", block.text + "\n", flags=re.MULTILINE):
        wanted = piece.strip("\n").splitlines()
        starts = range(at, len(lines) - len(wanted) + 1)
        found = next((n for n in starts if lines[n : n + len(wanted)] == wanted), None)
        if not wanted or found is None:
            pytest.fail(f"{block.where}: not in {block.option('file')}:\n{piece}", pytrace=False)
        at = found + len(wanted)


def with_expectations(block: Block) -> ast.Module:
    """The code of a block; expressions with ``# -->`` behind them are compared with it."""
    text = "\n" * block.line + block.text
    wanted = {n: line.partition("# -->")[2] for n, line in enumerate(text.splitlines(), 1) if "# -->" in line}

    class Compare(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.Expr:
            want = wanted.pop(node.end_lineno or 0, None)
            if want is None:
                return node
            where = f"{block.page.relative_to(ROOT)}:{node.end_lineno}"
            given = [ast.Constant(where), ast.Constant(want.strip()), node.value]
            call = ast.Call(ast.Name("__expect__", ast.Load()), given, [])
            return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))

    tree: ast.Module = Compare().visit(ast.parse(text, str(block.page)))
    for line in wanted:
        raise ValueError(f"{block.page.relative_to(ROOT)}:{line}: # --> has no expression before it")
    return tree


def expect_value(where: str, expected: str, value: object) -> None:
    """Compare what a value looks like."""
    expect(where, [expected], [repr(value)])


def commands(block: Block) -> list[tuple[int, str, list[str]]]:
    """The commands of a console block with their line and what they are said to print."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            found.append((number, line[2:], []))
        elif found and found[-1][1].endswith("\\"):
            start, command, printed = found[-1]
            found[-1] = (start, f"{command[:-1]} {line}", printed)
        elif found:
            found[-1][2].append(" ".join(line.split()))
        else:
            raise ValueError(f"{block.where}: a console block begins with $")
    return found


def rows(cursor: psycopg.Cursor[Any]) -> list[str]:
    """The rows as the server writes them, columns between bars."""
    result = cursor.pgresult
    assert result is not None
    return [
        " | ".join((result.get_value(r, c) or b"").decode() for c in range(result.nfields)).strip()
        for r in range(result.ntuples)
    ]


def expect(where: str, expected: list[str], actual: list[str]) -> None:
    """Compare line by line; ``...`` stands for anything."""
    same = len(expected) == len(actual) and all(
        re.fullmatch(".*".join(map(re.escape, e.split("..."))), a)
        for e, a in zip(expected, actual, strict=True)
    )
    if not same:
        lines = [f"{where}: the page says", *expected, "but the example gives", *actual]
        pytest.fail("\n  ".join(lines), pytrace=False)


def needs_spark(page: Path) -> bool:
    """Whether the page starts Spark: then it shares the session of the other tests that do."""
    return any(b.language == "python" and "postbus.spark" in b.text for b in blocks(page))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.xdist_group("spark"), pytest.mark.timeout(400)] if needs_spark(page) else [],
        )
        for page in PAGES
    ],
)
def test_examples(page: Path, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    if needs_spark(page):
        pytest.importorskip("pyspark")
    monkeypatch.setenv("POSTBUS_DSN", db.dsn)
    player = Player(db)
    for block in blocks(page):
        player.play(block)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    if page == NOT_RUN:
        pytest.skip("its commands take minutes")
    for block in blocks(page):
        assert block.language in {*RUN, "text"}, f"{block.where}: a block in {block.language!r}"
