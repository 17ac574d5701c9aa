"""Spark wraps an error of Python into its own, with two stack traces: what it was is somewhere inside."""

from __future__ import annotations

import re

from postbus import errors
from postbus.errors import PostbusError

_OURS = re.compile(
    r"^(?:\w+: )*postbus\.errors\.(\w+): (.*?)"
    r"(?=\n(?:\s*SQLSTATE: |\s*at |=== |\n)|\s+SQLSTATE: \w{5}|\Z)",
    re.MULTILINE | re.DOTALL,
)
_THEIRS = re.compile(
    r"^(?:: |Caused by: )?((?:\w+\.)*\w*(?:Error|Exception|NotAvailable)\w*): (.+)$", re.MULTILINE
)
_FULL = "No space left on device"


def explain(text: str, kind: str) -> PostbusError:
    """The error that a text from Spark tells of."""
    found = _OURS.search(text)
    if found:
        message, _, hint = found[2].strip().partition("\n")
        cls = getattr(errors, found[1], PostbusError)
        if not (isinstance(cls, type) and issubclass(cls, PostbusError)) or cls is errors.EmbeddedError:
            cls = PostbusError
        return cls(message, hint=hint.strip() or None)
    theirs = _THEIRS.findall(text)
    first = text.strip().split("\n", 1)[0] or kind
    message = f"{theirs[-1][0].rsplit('.', 1)[-1]}: {theirs[-1][1]}" if theirs else first
    if _FULL in text:
        return PostbusError(
            f"the disk is full: {message}",
            hint="Make room and run the pipeline again: it goes on where it was.",
        )
    return PostbusError(
        f"Spark failed: {message[:600]}", hint="Run the pipeline again: it goes on where it was."
    )
