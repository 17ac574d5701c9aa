"""The pages of the documentation, and what is in them: sections, fenced blocks, statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_HEADING = re.compile(r"^(?P<level>#{1,6}) +(?P<title>.*?) *$")
_TOKEN = re.compile(
    r"""(?P<expected>-->[ ]?(?P<row>[^\n]*))
    | --[^\n]*
    | /\*.*?\*/
    | '(?:[^']|'')*'
    | "(?:[^"]|"")*"
    | (?P<tag>\$\w*\$).*?(?P=tag)
    | (?P<end>;)
    | .""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: ```` ```language words ````."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def option(self, name: str) -> str | None:
        """The value of ``name=value`` in the info of the fence."""
        return next((w.partition("=")[2] for w in self.words if w.startswith(f"{name}=")), None)


@dataclass
class Section:
    """A heading, the text below it up to the next heading, and its blocks."""

    page: Path
    line: int
    level: int
    title: str
    lines: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def anchor(self) -> str:
        """The fragment that a link to this heading has."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Statement:
    """One statement of an SQL block, and the rows that ``-->`` comments expect."""

    line: int
    text: str
    rows: tuple[str, ...]


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def sections(page: Path) -> tuple[Section, ...]:
    """The page cut at its headings; what is above the first one has level 0."""
    found = [Section(page, 1, 0, "")]
    fence: tuple[int, str, str, list[str]] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        mark = _FENCE.match(line)
        if fence is not None:
            start, indent, info, body = fence
            if mark and not mark["info"]:
                language, *words = info.split() or [""]
                found[-1].blocks.append(Block(page, start, language, tuple(words), "\n".join(body)))
                fence = None
            else:
                body.append(line.removeprefix(indent))
        elif mark:
            fence = (number, mark["indent"], mark["info"], [])
        elif heading := _HEADING.match(line):
            found.append(Section(page, number, len(heading["level"]), heading["title"]))
        else:
            found[-1].lines.append(line)
    if fence is not None:
        raise ValueError(f"{page.relative_to(ROOT)}:{fence[0]}: the block does not end")
    return tuple(found)


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order."""
    return [block for section in sections(page) for block in section.blocks]


def statements(block: Block) -> Iterator[Statement]:
    """The statements of an SQL block, one by one.

    The rows that a statement is expected to return follow it as comments: ``--> 1 | customer-1``.
    """
    done: list[tuple[int, str, list[str]]] = []
    text, line, start = "", block.line + 1, block.line + 1
    for token in _TOKEN.finditer(block.text):
        piece = token[0]
        if token["expected"] is not None:
            if not done or text.strip():
                raise ValueError(f"{block.page.relative_to(ROOT)}:{line}: --> has no statement before it")
            done[-1][2].append(token["row"].strip())
        elif token["end"]:
            done.append((start, text.strip(), []))
            text = ""
        elif not piece.startswith(("--", "/*")):
            if not text.strip():
                start = line
            text += piece
        line += piece.count("\n")
    if text.strip():
        raise ValueError(f"{block.page.relative_to(ROOT)}:{start}: the statement does not end with ;")
    for number, statement, rows in done:
        yield Statement(number, statement, tuple(rows))
