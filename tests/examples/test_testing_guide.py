"""The tests of docs/guide/testing.md."""

from __future__ import annotations

from tests.examples.running import run_tests


def test_its_own_tests(server_dsn: str) -> None:
    assert run_tests("examples/testing", server_dsn) == 7
