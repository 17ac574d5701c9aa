"""Arguments that several commands share, and how ``key=value`` is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from postbus.errors import AlreadyExists, translated

Stream = Annotated[str, typer.Argument(help="Name of the stream.", show_default=False)]
Queue = Annotated[str, typer.Argument(help="Name of the queue.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Name of a stream or a queue.", show_default=False)]
Group = Annotated[str, typer.Argument(help="Name of the group.", show_default=False)]
OnlyGroup = Annotated[str | None, typer.Option("--group", "-g", help="Only this group.", show_default=False)]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", metavar="KEY=VALUE", help="Any other option; may be repeated.", show_default=False
    ),
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="KEY=VALUE", help="A header; may be repeated.", show_default=False),
]
Type = Annotated[str, typer.Option("--type", "-t", help="What kind of message it is.")]
OnlyType = Annotated[
    str | None, typer.Option("--type", "-t", help="Only messages of this type.", show_default=False)
]
OnlyKey = Annotated[
    str | None, typer.Option("--key", "-k", help="Only messages of this key.", show_default=False)
]
IfNotExists = Annotated[bool, typer.Option("--if-not-exists", help="Do nothing if the name is taken.")]


def pairs(given: Sequence[str] | None, flag: str) -> dict[str, str]:
    """Read ``key=value`` pairs."""
    result = {}
    for item in given or ():
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{item!r} is not key=value", param_hint=flag)
        result[key] = text
    return result


def headers(given: Sequence[str] | None) -> str | None:
    """The headers of a message as JSON, or None without any."""
    return json.dumps(pairs(given, "--header")) if given else None


def options(given: Sequence[str] | None, **named: Any) -> str:
    """The options object of the engine as JSON: named ones that were given, and ``--option`` pairs.

    A value that reads as a number, true, false or null is one; everything else is text.
    """
    result = {key: item for key, item in named.items() if item is not None}
    for key, text in pairs(given, "--option").items():
        result[key] = _scalar(text)
    return json.dumps(result)


@contextmanager
def unless_taken(skip: bool) -> Iterator[None]:
    """Create something; that its name is taken is no error if `skip`."""
    try:
        with translated():
            yield
    except AlreadyExists:
        if not skip:
            raise


def _scalar(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if found is None or isinstance(found, bool | int | float) else text
