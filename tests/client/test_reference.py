"""docs/reference/python.md and the code agree, the two clients agree, and the names are where they belong."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import postbus
from postbus import AsyncBus, Bus, DeadLetter, Message, PostbusError
from postbus.client import AsyncDelivery, AsyncGroup, AsyncQueue, AsyncStream, Delivery, Group, Queue, Stream
from tests.docs.pages import ROOT, sections

PAGE = ROOT / "docs" / "reference" / "python.md"
TEXT = PAGE.read_text(encoding="utf-8")

# For consumers and workers, not for people.
INTERNAL = {
    "adopt", "disown", "create", "wait_for", "channel", "label", "take", "deliver", "codec_of", "ordering",
    "default_lease", "next_due",
}  # fmt: skip
CLASSES = {"queue": Queue, "stream": Stream, "group": Group, "m": Delivery, "bus": Bus}
TWINS = [
    (Bus, AsyncBus),
    (Queue, AsyncQueue),
    (Stream, AsyncStream),
    (Group, AsyncGroup),
    (Delivery, AsyncDelivery),
]


def methods(cls: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in INTERNAL
    }


def signature(function: Any) -> str:
    parts: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{name}")
        elif parameter.default is parameter.empty:
            parts.append(name)
        else:
            parts.append(f"{name}={parameter.default!r}".replace("'", '"'))
    return ", ".join(parts)


@pytest.mark.parametrize("prefix", ["queue", "stream", "group", "m"])
def test_every_method_is_documented_as_it_is(prefix: str) -> None:
    written = {
        name: " ".join(arguments.split())
        for name, arguments in re.findall(rf"`{prefix}\.(\w+)\(([^`]*)\)`", TEXT)
        if name in methods(CLASSES[prefix])
    }
    # The page says "queue.messages()" in passing; the signature comes with its own paragraph.
    signatures = {
        name: [
            " ".join(a.split()) for a in re.findall(rf"^`{prefix}\.{name}\(([^`]*)\)`", TEXT, re.MULTILINE)
        ]
        for name in methods(CLASSES[prefix])
    }
    assert written.keys() == methods(CLASSES[prefix]).keys()
    for name, function in methods(CLASSES[prefix]).items():
        assert signature(function) in signatures[name], f"{prefix}.{name}"


def test_the_bus_is_documented() -> None:
    assert f"`Bus({signature(Bus)})`" in TEXT
    for name in ("queue", "stream"):
        assert f"`bus.{name}({signature(getattr(Bus, name))})`" in TEXT
    [section] = [s for s in sections(PAGE) if s.title == "Bus"]
    for name in methods(Bus):
        assert f"`{name}(" in section.text, name
    for name, member in inspect.getmembers(Bus):
        if isinstance(member, property):
            assert f"| `{name}` |" in section.text, name


def test_every_argument_is_explained() -> None:
    for section in sections(PAGE):
        found = re.findall(r"^`(?:\w+\.)?(\w+)\(([^`]*)\)`", section.text, re.MULTILINE)
        for name, arguments in found:
            if section.title == "Delivery":
                continue
            for part in arguments.split(","):
                argument = part.strip().lstrip("*").partition("=")[0]
                if argument:
                    assert re.search(rf"^- (`\w+`, )*`{argument}`", section.text, re.MULTILINE), (
                        f"{section.where}: {name}: {argument}"
                    )


def test_every_name_and_attribute_is_documented() -> None:
    for name in postbus.__all__:
        if name not in ("__version__", "Worker"):
            assert f"`{name}`" in TEXT, name
    for field in (*Message.__struct_fields__, "letter", "reason", "died_at"):
        assert f"`{field}`" in TEXT, field
    assert set(DeadLetter.__struct_fields__) - set(Message.__struct_fields__) == {
        "letter",
        "reason",
        "died_at",
    }


@pytest.mark.parametrize(("blocking", "asynchronous"), TWINS, ids=lambda c: c.__name__)
def test_the_two_clients_are_one(blocking: type, asynchronous: type) -> None:
    there, here = methods(asynchronous), methods(blocking)
    assert there.keys() == here.keys()
    for name in here:
        assert signature(here[name]) == signature(there[name])
        assert (inspect.getdoc(here[name]) or "").splitlines()[:1] == (
            inspect.getdoc(there[name]) or ""
        ).splitlines()[:1]


@pytest.mark.parametrize("cls", [cls for pair in TWINS for cls in pair], ids=lambda c: c.__name__)
def test_public_methods_have_docstrings(cls: type) -> None:
    for name, member in inspect.getmembers(cls):
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{cls.__name__}.{name}"


def test_names() -> None:
    assert len(postbus.__all__) <= 26
    for name in postbus.__all__:
        assert getattr(postbus, name) is not None
        assert name in dir(postbus)
    errors = {e.__name__ for e in PostbusError.__subclasses__() if e.__module__ == "postbus.errors"}
    assert errors <= set(postbus.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        postbus.nonsense  # noqa: B018


def test_import_is_quick() -> None:
    """The command line begins with it."""
    code = "import sys, postbus; print(sorted(m for m in sys.modules if m.split('.')[0] in HEAVY))"
    heavy = "{'psycopg', 'psycopg_pool', 'msgspec', 'pydantic', 'asyncio', 'opentelemetry'}"
    done = subprocess.run(
        [sys.executable, "-c", code.replace("HEAVY", heavy)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
