"""Where payloads come from: the command line, stdin or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

import typer

_CHUNK = 1 << 18


def source(payload: str | None, file: Path | None = None) -> AbstractContextManager[BinaryIO] | None:
    """What to read the payload from, or None where it is given."""
    if file is not None:
        if payload is not None:
            raise typer.BadParameter("give a payload or --file, not both", param_hint="PAYLOAD")
        return file.open("rb")
    if payload is None and sys.stdin.isatty():
        raise typer.BadParameter("give a payload, or '-' to type one", param_hint="PAYLOAD")
    return nullcontext(sys.stdin.buffer) if payload in (None, "-") else None


def body(
    payload: str | None, stream: AbstractContextManager[BinaryIO] | None, *, binary: bool
) -> str | bytes:
    """The one payload: as given, or all there is to read."""
    if stream is None:
        return payload or ""
    with stream as opened:
        read = opened.read()
    return read if binary else _text(read).removesuffix("\n")


def batches(stream: AbstractContextManager[BinaryIO]) -> Iterator[list[str]]:
    """The lines, in batches of whatever is there to be read."""
    rest = b""
    with stream as opened:
        while chunk := opened.read1(_CHUNK):  # type: ignore[attr-defined]
            *whole, rest = (rest + chunk).split(b"\n")
            batch = [_text(line).removesuffix("\r") for line in whole if line.strip()]
            if batch:
                yield batch
    if rest.strip():
        yield [_text(rest)]


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise typer.BadParameter(f"this is not UTF-8 text ({exc}); see --binary") from None
    if "\0" in text:
        raise typer.BadParameter("PostgreSQL has no text with a zero byte in it; see --binary")
    return text
