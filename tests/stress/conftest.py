"""Fixtures of the stress tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.conftest import Database, _fresh

FreshDatabase = Callable[[], AbstractContextManager[Database]]


@pytest.fixture
def fresh(server_dsn: str, template: str) -> FreshDatabase:
    """Makes databases with the engine, for tests that need one per round."""

    @contextmanager
    def make() -> Iterator[Database]:
        yield from _fresh(server_dsn, template)

    return make
