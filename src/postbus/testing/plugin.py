"""The pytest plugin: fixtures for the tests of applications. See docs/guide/testing.md.

pytest loads this file in every run, also where nobody asks for a fixture. So everything else is imported by
the first fixture that is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from postbus import AsyncBus, Bus, DeadLetter, Message
    from postbus.testing import Assertions, Clock, Handled

F = TypeVar("F", bound=Callable[..., Any])


def _async_fixture(function: F) -> F:
    """pytest-asyncio takes only fixtures of its own kind, in its strict mode. anyio takes those too."""
    kind: Any = import_module("pytest_asyncio") if find_spec("pytest_asyncio") else pytest
    made: F = kind.fixture(function)
    return made


@pytest.fixture(scope="session")
def postbus_server() -> Iterator[str]:
    """The DSN of a server to make databases on: ``$POSTBUS_TEST_DSN``, or an embedded one."""
    from postbus.testing import server

    with server() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def postbus_template(postbus_server: str) -> Iterator[str]:
    """The name of the database that those of the tests are copied from; it has the engine."""
    from postbus.testing import template

    with template(postbus_server) as name:
        yield name


@pytest.fixture
def postbus_dsn(postbus_server: str, postbus_template: str) -> Iterator[str]:
    """The DSN of a fresh database with the engine, for this test alone; also in ``$POSTBUS_DSN``."""
    from postbus.testing import fresh, url

    with fresh(postbus_server, postbus_template) as name, pytest.MonkeyPatch.context() as patch:
        dsn = url(postbus_server, name)
        patch.setenv("POSTBUS_DSN", dsn)
        yield dsn


@pytest.fixture
def bus(postbus_dsn: str) -> Iterator[Bus]:
    """An open `Bus` on the database of the test."""
    from postbus import Bus

    with Bus(postbus_dsn) as opened:
        yield opened


@_async_fixture
async def async_bus(postbus_dsn: str) -> AsyncIterator[AsyncBus]:
    """An open `AsyncBus` on the database of the test; for tests of anyio (asyncio) or pytest-asyncio."""
    from postbus import AsyncBus

    async with AsyncBus(postbus_dsn) as opened:
        yield opened


@pytest.fixture
def clock(postbus_dsn: str) -> Clock:
    """Moves the engine's time: ``clock.move(hours=1)``."""
    from postbus.testing import Clock

    return Clock(postbus_dsn)


@pytest.fixture
def drain(postbus_dsn: str) -> Callable[..., list[Handled]]:
    """Runs a worker until there is nothing more to do: ``drain(worker)``."""
    from postbus.testing import drain

    return partial(drain, dsn=postbus_dsn)


@pytest.fixture
def async_drain(postbus_dsn: str) -> Callable[..., Coroutine[Any, Any, list[Handled]]]:
    """The same in asynchronous tests, to be awaited."""
    from postbus.testing import drain_async

    return partial(drain_async, dsn=postbus_dsn)


@pytest.fixture
def postbus_assertions(postbus_dsn: str) -> Assertions:
    """All of the following."""
    from postbus.testing import Assertions

    return Assertions(postbus_dsn)


@pytest.fixture
def assert_sent(postbus_assertions: Assertions) -> Callable[..., list[Message[Any]]]:
    """Asserts that a queue has messages: by name, and by `payload`, `type`, `key`, `count`."""
    return postbus_assertions.assert_sent


@pytest.fixture
def assert_published(postbus_assertions: Assertions) -> Callable[..., list[Message[Any]]]:
    """Asserts that a stream has events: by name, and by `payload`, `type`, `key`, `count`."""
    return postbus_assertions.assert_published


@pytest.fixture
def assert_empty(postbus_assertions: Assertions) -> Callable[..., None]:
    """Asserts that a queue has no messages, or that a `group` of a stream has nothing left to do."""
    return postbus_assertions.assert_empty


@pytest.fixture
def dead_letters(postbus_assertions: Assertions) -> Callable[..., list[DeadLetter[Any]]]:
    """The dead letters of a queue or stream, by its name."""
    return postbus_assertions.dead_letters
