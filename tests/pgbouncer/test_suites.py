"""The suites of clients and workers through PgBouncer, in part; `make test-pooled` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import POOLED
from tests.pgbouncer.pooler import Pooler

ROOT = Path(__file__).parents[2]
PART = (
    "tests/client/test_verbs.py",
    "tests/client/test_streams.py",
    "tests/client/test_leases.py",
    "tests/worker/test_handlers.py",
    "tests/worker/test_transactional.py",
    "tests/worker/test_order.py",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(POOLED, reason="everything goes through PgBouncer already")
def test_part_of_the_suites(pgbouncer: Pooler) -> None:
    """The same tests, with POSTBUS_TEST_POOLED: a client that needs a session of its own would fail them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *PART]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "POSTBUS_TEST_POOLED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
