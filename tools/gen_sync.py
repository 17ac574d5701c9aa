"""Write the blocking client from the asynchronous one.

Usage: python tools/gen_sync.py          write src/postbus/client/_sync
       python tools/gen_sync.py --check  only say whether it is up to date (exit code 1 if not)

The source is src/postbus/client/_async; the result is never edited. Names change by the table below,
``async`` and ``await`` go, and ruff puts the rest into its format. Where the two worlds really differ,
postbus.client._compat has a pair of functions.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/postbus/client/_async"
TARGET = ROOT / "src/postbus/client/_sync"

BANNER = '# Generated from ../_async/{name} by tools/gen_sync.py ("make format"): edit that one.\n'

NAMES = {
    "AEvent": "Event",
    "ALock": "Lock",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "_async": "_sync",
    "acancel": "cancel",
    "ajoin": "join",
    "arun": "run",
    "asleep": "sleep",
    "asynccontextmanager": "contextmanager",
    "aspawn": "spawn",
    "fetch_async": "fetch",
}
_AWAITABLE = re.compile(r"\bAwaitable\[((?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*)\]")


def renamed(name: str) -> str:
    """One name as it is in the blocking client."""
    if name in NAMES:
        return NAMES[name]
    return re.sub(r"^(_?)Async(?=[A-Z])", r"\1", name)


def in_text(text: str) -> str:
    """A string or comment: examples in docstrings are code too."""
    text = re.sub(r"\basync (?=for|with|def)", "", text)
    text = re.sub(r"\bawait ", "", text)
    return re.sub(r"\b\w+\b", lambda m: renamed(m[0]), text)


def convert(source: str) -> str:
    """The blocking form of a module."""
    source = _AWAITABLE.sub(r"\1", source)
    drop = False
    parts: list[str] = []
    end = (1, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        gap = ""
        if token.start > end:
            gap = "\n" * (token.start[0] - end[0]) if token.start[0] > end[0] else ""
            gap += " " * (token.start[1] - (0 if gap else end[1]))
        if drop:
            gap = ""
        drop = False
        text = token.string
        if token.type == tokenize.NAME:
            if text in ("async", "await"):
                parts.append(gap)
                drop, end = True, token.end
                continue
            text = renamed(text)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            text = in_text(text)
        parts.append(gap + text)
        end = token.end
        if token.type in (tokenize.NEWLINE, tokenize.NL):
            end = (token.end[0] + 1, 0)
    return "".join(parts).replace(", Awaitable", "").replace("Awaitable, ", "")


def formatted(text: str, name: str) -> str:
    """As ruff would have it."""
    ruff = Path(sys.executable).parent / "ruff"
    for command in (["check", "--fix-only", "--select", "I,F401,UP"], ["format"]):
        text = subprocess.run(
            [ruff, *command, "--quiet", "--stdin-filename", str(TARGET / name), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
    return text


def main(check: bool) -> int:
    """Write, or compare."""
    stale = []
    wanted = {
        p.name: formatted(BANNER.format(name=p.name) + convert(p.read_text()), p.name)
        for p in SOURCE.glob("*.py")
    }
    TARGET.mkdir(exist_ok=True)
    for name, text in wanted.items():
        path = TARGET / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    for path in TARGET.glob("*.py"):
        if path.name not in wanted:
            stale.append(path.name)
            if not check:
                path.unlink()
    if stale and check:
        print(f"the blocking client is not up to date ({', '.join(sorted(stale))}): run make format")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
