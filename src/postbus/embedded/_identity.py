"""As whom the server runs.

PostgreSQL refuses to run as root. An ordinary user runs it as himself; root runs it

- in a user namespace of one user: to the kernel the files still belong to root, so nothing is chowned
  and the directory stays 0700;
- or, where namespaces are refused (most containers), as ``nobody``, who is given the directory;
- or, where the directory belongs to an ordinary user already, as that user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from postbus.errors import EmbeddedError

_NOBODY = 65534


@dataclass(frozen=True)
class Identity:
    """How to run a program as the server's user.

    ``prefix`` goes before the command. ``owner`` is the user and group to hand files to, if any.
    """

    name: str
    prefix: tuple[str, ...] = ()
    owner: tuple[int, int] | None = None

    def give(self, path: Path) -> None:
        """Hand a file to the server's user, where that is somebody else."""
        if self.owner:
            os.chown(path, *self.owner)


def choose(home: Path, data: Path, postgres: Path) -> Identity:
    """Return the first identity under which the server program runs and can reach its directory."""
    if os.geteuid() != 0:
        return Identity("user")
    for identity in _for_root(home, data):
        if _works(identity, home, postgres):
            return identity
    raise EmbeddedError(
        f"PostgreSQL does not run as root, and no other user can run {postgres} in {home}",
        remedy="Run as an ordinary user, or allow user namespaces (unshare), "
        "or put the program and the directory where the user nobody can reach them.",
    )


def _for_root(home: Path, data: Path) -> Iterator[Identity]:
    owner = (data if data.exists() else home).stat()
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if unshare and owner.st_uid == 0:
        ids = (f"--map-user={_NOBODY}", f"--map-group={_NOBODY}")
        yield Identity("namespace", (unshare, "--user", *ids, "--"))
    if setpriv and (owner.st_uid != 0 or not data.exists()):
        uid, gid = (owner.st_uid, owner.st_gid) if owner.st_uid else _nobody()
        drop = (setpriv, f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
        yield Identity("setuid", (*drop, "--"), (uid, gid))
        # Below a private home directory (/root) the server needs leave to pass through.
        keep = "+dac_override,+dac_read_search"
        yield Identity("setuid", (*drop, f"--inh-caps={keep}", f"--ambient-caps={keep}", "--"), (uid, gid))
        keep = "+dac_override"
        yield Identity("setuid", (*drop, f"--inh-caps={keep}", f"--ambient-caps={keep}", "--"), (uid, gid))


def _nobody() -> tuple[int, int]:
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return _NOBODY, _NOBODY
    return entry.pw_uid, entry.pw_gid


def _works(identity: Identity, home: Path, postgres: Path) -> bool:
    script = 'cd "$1" && exec "$2" --version'
    command = [*identity.prefix, "sh", "-c", script, "sh", str(home.parent), str(postgres)]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
