"""The runner itself: it would notice."""

from __future__ import annotations

import pytest

from tests.conftest import Database
from tests.docs.pages import ROOT, Block, statements
from tests.docs.test_examples import Player

FILE = "file=examples/django_shop/manage.py"


def block(text: str, language: str = "sql", *words: str) -> Block:
    return Block(ROOT / "page.md", 10, language, words, text)


def test_statements_are_cut_where_they_end() -> None:
    text = """select ';', $$;$$, "a;" -- ;
    /* ; */ from t;  --> 1 | x
    --> 2 | y

    begin;"""
    found = [(s.line, s.text.split()[0], s.rows) for s in statements(block(text))]
    assert found == [(11, "select", ("1 | x", "2 | y")), (15, "begin", ())]


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        (block("select 1;\nselect 2; --> 3"), r"page.md:12: the page says\n  3\n"),
        (block("\nselect 1 / 0;"), "page.md:12: 22012"),
        (block("select 1;", "sql", "error=PB004"), "page.md:10: the last statement should fail with PB004"),
        (block("select 1 / 0;\nselect 1;", "sql", "error=22012"), "page.md:11: 22012"),
        (block("$ postbus streams\nsomething else", "console"), "page.md:11: the page says"),
        (block("$ postbus nonsense", "console"), "page.md:11: exit code 2"),
        (
            block("x = 1\nx + 1  # --> 3", "python"),
            r"page.md:12: the page says\n  3\n  but the example gives\n  2",
        ),
        (block("x = 1", "python", "file=examples/none.py"), "page.md:10: there is no examples/none.py"),
        (block("import sys\nimport os", "python", FILE), "page.md:10: not in examples/"),
        (block("import sys\n...\nimport os", "python", FILE), "page.md:10: not in examples/"),
    ],
)
def test_what_is_wrong_is_noticed(db: Database, example: Block, problem: str) -> None:
    with pytest.raises((pytest.fail.Exception, AssertionError), match=problem):
        Player(db).play(example)


def test_what_is_right_passes(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_DSN", db.dsn)
    player = Player(db)
    player.play(block("select 1, null, 'a b c'; --> 1 |  | a ... c"))
    player.play(block("select 1;\nselect 1 / 0;", "sql", "error=22012"))
    player.play(block("$ postbus streams create \\\n    orders\ncreated ...", "console"))
    player.play(block("import os\nassert os.environ['POSTBUS_DSN']", "python"))
    player.play(block("x = 'a b c'\nfor y in [x]:\n    y  # --> 'a ... c'", "python"))
    player.play(block('import os\nimport sys\n\n...\nif __name__ == "__main__":', "python", FILE))
