"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from tests.conftest import Database
from tests.engine.bus import Bus, Session


@pytest.fixture
def bus(db: Database) -> Bus:
    return Bus(db)


@pytest.fixture
def s(bus: Bus) -> Session:
    """The session that most tests need."""
    return bus.session()
