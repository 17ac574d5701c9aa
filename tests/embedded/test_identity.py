"""As root, PostgreSQL runs as somebody else, in each of the ways there are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from postbus.embedded import Server, _identity, find_binaries
from postbus.errors import EmbeddedError
from tests.embedded.conftest import Holder, alive, wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv"),
]


def only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    all_of_them = _identity._for_root

    def some(home: Path, data: Path) -> Iterator[_identity.Identity]:
        return (identity for identity in all_of_them(home, data) if identity.name == name)

    monkeypatch.setattr(_identity, "_for_root", some)


def owner_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def test_in_a_namespace_the_files_stay_with_root(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "--user", "true"], check=False).returncode:
        pytest.skip("user namespaces are refused here")
    only(monkeypatch, "namespace")
    with Server(data_dir) as server:
        psycopg.connect(server.dsn).close()
        assert (data_dir / "data").stat().st_uid == 0


def test_without_namespaces_the_server_runs_as_nobody(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "setuid")
    uid, _ = _identity._nobody()
    with Server(data_dir) as server:
        psycopg.connect(server.dsn).close()
        assert owner_of(server.pid) == uid
        assert (data_dir / "data").stat().st_uid == uid
    # The directory above belongs to root alone (0700), so the server needed leave to pass through.
    assert data_dir.parent.stat().st_mode & 0o077 == 0


def test_binaries_in_a_private_place_are_copied(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "setuid")
    found = find_binaries()
    if not (found.bindir.parent / "share").is_dir():
        pytest.skip("this PostgreSQL is spread over the system")
    private = data_dir.parent / "private"
    private.mkdir(mode=0o700)
    package = found.bindir.parent.parent
    for folder in (package, package.with_name(f"{package.name}.libs")):
        if folder.is_dir():
            shutil.copytree(folder, private / folder.name, symlinks=True)
    hidden = replace(found, bindir=private / found.bindir.relative_to(package.parent))
    with Server(data_dir, binaries=hidden) as server:
        psycopg.connect(server.dsn).close()
        program = Path(f"/proc/{server.pid}/exe").resolve()
        assert not program.is_relative_to(private)
    assert not program.exists()


def test_a_warm_start_runs_as_the_owner_of_the_data(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        only(patch, "setuid")
        Server(data_dir).start().stop()
    with Server(data_dir) as server:
        assert owner_of(server.pid) == _identity._nobody()[0]


def test_a_directory_of_somebody_is_used_as_that_user(data_dir: Path) -> None:
    uid, gid = _identity._nobody()
    data_dir.mkdir(mode=0o700)
    os.chown(data_dir, uid, gid)
    with Server(data_dir) as server:
        psycopg.connect(server.dsn).close()
        assert owner_of(server.pid) == uid


@pytest.mark.fault
def test_as_nobody_the_server_goes_with_its_supervisor(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[..., Holder]
) -> None:
    with monkeypatch.context() as patch:
        only(patch, "setuid")
        Server(data_dir).start().stop()
    holder = hold(data_dir)
    assert owner_of(holder.server_pid) == _identity._nobody()[0]
    stat = Path(f"/proc/{holder.server_pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), 9)
    assert wait_until(lambda: not alive(holder.server_pid))


def test_nobody_to_run_as_says_so(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "none")
    with pytest.raises(EmbeddedError, match="does not run as root"):
        Server(data_dir).start()


def test_an_ordinary_user_needs_none_of_this(hold: Callable[..., Holder]) -> None:
    uid, gid = _identity._nobody()
    prefix = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--")
    script = "from postbus.embedded import find_binaries; find_binaries()"
    # setpriv still has the powers of root when it runs a program; what that program runs has not.
    probe = [*prefix, "sh", "-c", 'exec "$0" -c "$1"', sys.executable, script]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("nobody cannot reach this Python")
    with tempfile.TemporaryDirectory(prefix="pbtest-") as path:
        os.chown(path, uid, gid)
        holder = hold(path, prefix=prefix)
        assert owner_of(holder.server_pid) == uid
        psycopg.connect(holder.dsn).close()
        holder.end()
        assert not alive(holder.server_pid)
