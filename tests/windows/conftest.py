"""Fixtures: the sessions of the engine's tests."""

from tests.engine.conftest import bus, s

__all__ = ["bus", "s"]
