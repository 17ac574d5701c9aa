"""Write the lock: exact versions with hashes, for every platform and Python from 3.11, and no addresses.

Usage: python tools/lock.py requirements/dev.lock

uv does the work, in a throw-away environment, so that the project does not depend on it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HEADER = """\
# Written by `make lock`; do not edit. Everything that running, testing and checking Postbus needs.
# pip install --require-hashes -r requirements/dev.lock
"""


def pip_indexes() -> dict[str, str]:
    """Hand pip's own settings for indexes to uv, which does not read them."""
    show = [sys.executable, "-m", "pip", "config", "get"]
    env: dict[str, str] = {}
    asked = subprocess.run([*show, "global.index-url"], capture_output=True, text=True, check=False)
    index = os.environ.get("PIP_INDEX_URL") or asked.stdout.strip()
    if index:
        env["UV_DEFAULT_INDEX"] = index
    return env


def main(lock: Path) -> None:
    """Resolve the dependencies and write the lock."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        bin_dir = Path(scratch) / "bin"
        subprocess.run([bin_dir / "python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        command = [str(bin_dir / "uv"), "pip", "compile", "--quiet", "--no-config", "--no-python-downloads"]
        command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--upgrade"]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["pyproject.toml", "--extra", "embedded", "--extra", "connect"]
        command += ["--group", "dev", "--group", "bench"]
        env = {**os.environ, **pip_indexes()}
        done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    text = HEADER + done.stdout
    if re.search(r"://|^-|^/|@ ", done.stdout, re.MULTILINE):
        sys.exit("the lock would name an address; check the settings of pip and uv")
    lock.write_text(text)
    print(f"{lock}: {len(re.findall('^[a-z].*==', text, re.MULTILINE))} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
