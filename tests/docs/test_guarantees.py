"""Every promise names tests that exist, and no page links to what is not there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, pages, sections

GUARANTEES = ROOT / "docs" / "guarantees.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@cache
def named_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


@every_page
def test_named_tests_exist(page: Path) -> None:
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for file, name in _TEST.findall(line):
            where = f"{page.relative_to(ROOT)}:{number}"
            assert (ROOT / file).is_file(), f"{where}: there is no {file}"
            assert not name or name in named_in(ROOT / file), f"{where}: {file} has no {name}"


def test_every_promise_names_a_test() -> None:
    promises = 0
    for section in sections(GUARANTEES):
        table = [line for line in section.lines if line.startswith("|")]
        if not table or "proved by" not in table[0]:
            continue
        for row in table[2:]:
            promises += 1
            assert any(name for _, name in _TEST.findall(row)), f"{section.where}: no test for {row[:80]}"
    assert promises > 20


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for section in sections(page):
        for target in _LINK.findall(section.text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = unquote(target).partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{section.where}: {target} leads nowhere"
            if fragment:
                anchors = {s.anchor for s in sections(file)}
                assert fragment in anchors, f"{section.where}: {target} has no such heading"
