"""Running the examples as their users do: in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.docs.pages import ROOT


def run(*command: str, **env: str) -> str:
    """Run a Python module of the checkout to its end; returns what it printed. Warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", *command],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_tests(folder: str, server_dsn: str) -> int:
    """Run the tests of an example with the plugin, on this server; returns how many passed."""
    plugin = ("-p", "postbus.testing.plugin", "-p", "no:cacheprovider")
    printed = run("pytest", *plugin, "-q", folder, POSTBUS_TEST_DSN=server_dsn)
    passed = re.search(r"^(\d+) passed in", printed, re.MULTILINE)
    assert passed, printed
    return int(passed[1])


@contextmanager
def running(*command: str, **env: str) -> Iterator[None]:
    """Have a worker run meanwhile. A signal ends it, and it has to end well."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", *command],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=20)
        assert process.returncode == 0, printed
    finally:
        process.kill()
        process.communicate()


def until(found: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, f"not found after {seconds} seconds"
        time.sleep(0.05)
