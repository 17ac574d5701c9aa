"""Fixtures of the queue stress tests."""

from __future__ import annotations

from tests.stress.conftest import fresh

__all__ = ["fresh"]
