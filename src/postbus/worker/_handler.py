"""A handler: what to call, for which messages, and how."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from postbus import _telemetry
from postbus.client._message import Message
from postbus.errors import BadArgument
from postbus.serializers import Serializer
from postbus.worker._policy import Backoff

Function = Callable[..., Any]
Call = Callable[[Message[Any]], Awaitable[Any]]
Middleware = Callable[[Message[Any], Call], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True)
class Handler:
    """One decorated function with its settings."""

    function: Function
    source: str
    group: str | None = None
    type: str | None = None
    concurrency: int = 1
    prefetch: int | None = None
    lease: float | None = None
    rate: float | None = None
    burst: int | None = None
    timeout: float | None = None
    backoff: Backoff | None = None
    max_attempts: int | None = None
    transactional: bool = False
    manual_ack: bool = False
    process: bool = False
    weight: int = 1
    create: bool = False
    serializer: Serializer | None = None
    options: dict[str, Any]

    def __post_init__(self) -> None:
        what = self.what
        for name, least in (
            ("concurrency", 1),
            ("weight", 1),
            ("prefetch", 1),
            ("max_attempts", 1),
            ("burst", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadArgument(f"{what}: {name} must be at least {least}, not {value}")
        for name in ("lease", "rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadArgument(f"{what}: {name} must be above 0, not {value}")
        if self.burst is not None and self.rate is None:
            raise BadArgument(f"{what}: burst goes with rate")
        if self.process and (self.is_async or self.transactional):
            raise BadArgument(
                f"{what}: a handler in another process is a plain function without a transaction"
            )
        if self.manual_ack and self.transactional:
            raise BadArgument(
                f"{what}: transactional means that the worker acks, manual_ack that it does not"
            )
        if self.options and not self.create:
            raise BadArgument(f"{what}: unknown or without create=True: {', '.join(self.options)}")
        if inspect.isgeneratorfunction(self._bare) or inspect.isasyncgenfunction(self._bare):
            raise BadArgument(f"{what} is a generator: calling it would do nothing")
        wanted = 2 if self.transactional else 1
        try:
            inspect.signature(self.function).bind(*[None] * wanted)
        except TypeError as exc:
            takes = "the message and a connection" if self.transactional else "the message"
            raise BadArgument(f"{what} must take {takes}: {exc}") from exc

    @property
    def what(self) -> str:
        """How messages to people call it."""
        where = repr(self.source) if self.group is None else f"{self.source!r}, group {self.group!r}"
        return f"handler {self.name} of {where}"

    @property
    def _bare(self) -> Any:
        """The function without its frills."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        if inspect.isroutine(function) or inspect.isclass(function):
            return function
        return getattr(function, "__call__", function)  # noqa: B004 - an object that can be called

    @property
    def name(self) -> str:
        """The function's name."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__qualname__", None) or type(function).__qualname__)

    @property
    def is_async(self) -> bool:
        """Whether it runs on the loop."""
        return inspect.iscoroutinefunction(self._bare)

    @property
    def model(self) -> Any:
        """The type of the payload, from an annotation ``Message[Email]``.

        Raises:
            BadArgument: the annotation names something that cannot be found.
        """
        hint = self._first_hint()
        origin = typing.get_origin(hint)
        if not (isinstance(origin, type) and issubclass(origin, Message)):
            return None
        model = typing.get_args(hint)[0]
        return None if model is Any or isinstance(model, typing.TypeVar) else model

    def _first_hint(self) -> Any:
        """The annotation of the message. Those of other arguments may name what is not there."""
        function = inspect.unwrap(self._bare)
        try:
            parameters = list(inspect.signature(self.function).parameters)
            given = getattr(function, "__annotations__", {}).get(parameters[0])
        except (IndexError, TypeError, ValueError):
            return None
        if given is None:
            return None
        holder = type("_", (), {"__annotations__": {"m": given}})
        try:
            return typing.get_type_hints(holder, globalns=getattr(function, "__globals__", {}))["m"]
        except NameError as exc:
            if "[" not in str(given):
                return None  # it names no model
            raise BadArgument(
                f"{self.what}: the annotation {given!r} of its message cannot be read: {exc}",
                hint="Define or import the model at the top level of the module, not under TYPE_CHECKING.",
            ) from exc


def wrapped(call: Call, middleware: list[Middleware]) -> Call:
    """The call with all middleware around it, the first one outermost."""
    for each in reversed(middleware):
        call = _bound(each, call)
    return call


def _bound(middleware: Middleware, call: Call) -> Call:
    async def step(m: Message[Any]) -> Any:
        return await middleware(m, call)

    return step


def in_time(call: Call, seconds: float | None) -> Call:
    """The call, given up after so many seconds."""
    if seconds is None:
        return call

    async def limited(m: Message[Any]) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await call(m)
        except TimeoutError as exc:
            if limit.expired():
                raise TimeoutError(f"not done after {seconds:g} seconds") from exc
            raise

    return limited


def observed(call: Call) -> Call:
    """The call inside of its span, and measured; if the application has set that up by now."""
    if not (_telemetry.tracing() or _telemetry.metering()):
        return call

    async def watched(m: Message[Any]) -> None:
        began, ok = time.monotonic(), False
        try:
            with _telemetry.handling(m):
                await call(m)
            ok = True
        finally:
            _telemetry.took(time.monotonic() - began, m.source, ok)

    return watched
