"""The blocking client is what tools/gen_sync.py makes of the asynchronous one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(tool: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, tool, *args], capture_output=True, text=True, check=False)


def test_it_is_up_to_date() -> None:
    done = run(ROOT / "tools/gen_sync.py", "--check")
    assert (done.returncode, done.stdout) == (0, "")


def test_it_would_notice(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/gen_sync.py", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    client = tmp_path / "src/postbus/client"
    shutil.copytree(ROOT / "src/postbus", tmp_path / "src/postbus", ignore=shutil.ignore_patterns("sql"))
    tool = tmp_path / "tools/gen_sync.py"
    assert run(tool, "--check").returncode == 0
    delivery = client / "_sync/_delivery.py"
    delivery.write_text(delivery.read_text() + "\nx = 1\n")
    (client / "_sync/_more.py").write_text("")
    done = run(tool, "--check")
    assert done.returncode == 1
    assert "_delivery.py, _more.py" in done.stdout
    assert run(tool).returncode == 0
    assert run(tool, "--check").returncode == 0


def test_nothing_asynchronous_is_left() -> None:
    for path in (ROOT / "src/postbus/client/_sync").glob("*.py"):
        text = path.read_text()
        assert text.startswith("# Generated from")
        for word in ("async ", "await ", "asyncio", "__aiter__", "StopAsync", "AEvent"):
            assert word not in text, f"{word} in {path.name}"
