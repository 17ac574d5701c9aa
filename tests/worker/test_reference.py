"""docs/reference/worker.md and the code agree."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from postbus import Worker
from postbus.worker import Backoff, Retry
from tests.docs.pages import ROOT, Section, sections

PAGE = ROOT / "docs" / "reference" / "worker.md"


def section(title: str) -> Section:
    return next(s for s in sections(PAGE) if s.title == title)


def arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in inspect.signature(function).parameters.items() if n != "self"}


@pytest.mark.parametrize(
    ("title", "function", "call"),
    [
        ("Worker", Worker, "Worker"),
        ("queue", Worker.queue, "@worker.queue"),
        ("stream", Worker.stream, "@worker.stream"),
        ("cron", Worker.cron, "@worker.cron"),
    ],
)
def test_arguments(title: str, function: Any, call: str) -> None:
    text = section(title).text
    found = re.search(rf"`{re.escape(call)}\((.*?)\)`", text, re.DOTALL)
    assert found is not None, "the signature"
    written = [" ".join(part.split()) for part in found[1].split(",")]
    actual: list[str] = []
    for name, parameter in arguments(function).items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in actual:
            actual.append("*")
        if parameter.kind is parameter.VAR_KEYWORD:
            actual.append(f"**{name}")
        elif parameter.default is parameter.empty:
            actual.append(name)
        else:
            actual.append(f"{name}={parameter.default!r}".replace("'", '"'))
    assert written == actual
    explained = text if title != "stream" else text + section("queue").text
    for name in arguments(function):
        assert f"- `{name}`:" in explained, f"{name} is not explained"


def test_retry_and_backoff() -> None:
    text = section("Retry, GiveUp, Backoff").text
    backoff = ", ".join(f"{n}={p.default!r}" for n, p in arguments(Backoff).items())
    assert f"`Backoff({backoff})`" in text
    assert list(arguments(Retry)) == ["reason", "delay", "state"]
    assert "`Retry(reason, delay=None, state=None)`" in text
