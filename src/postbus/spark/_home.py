"""A SPARK_HOME whose Python processes start in a third of the time.

Spark starts several for each session and some for each query, and puts its own ``pyspark.zip`` first on their
path. From a zip, Python compiles every module anew. So Spark gets a SPARK_HOME of links to the installed
package, in which the zips are folders with links to the installed modules: those are compiled once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path


def spark_home(cache: Path) -> Path | None:
    """A directory to use as SPARK_HOME, made in a cache; None where one is set, or nothing can be gained."""
    import pyspark

    package = Path(pyspark.__file__).parent
    bridge = package.with_name("py4j")
    zips = list((package / "python" / "lib").glob("*.zip"))
    if os.environ.get("SPARK_HOME") or not zips or not bridge.is_dir():
        return None
    name = hashlib.sha256(f"{package} {pyspark.__version__} {bridge}".encode()).hexdigest()[:12]
    home = cache / f"spark-{name}"
    try:
        if not home.exists():
            made = cache / f"spark-{name}.{os.getpid()}"
            _make(made, package, bridge, zips)
            with contextlib.suppress(OSError):  # another process was first
                made.rename(home)
            shutil.rmtree(made, ignore_errors=True)
    except OSError:
        return None  # slower, but it works
    return home


def _make(home: Path, package: Path, bridge: Path, zips: list[Path]) -> None:
    for zip_ in zips:
        folder = home / "python" / "lib" / zip_.name
        folder.mkdir(parents=True)
        module = bridge if zip_.name.startswith("py4j") else package
        (folder / module.name).symlink_to(module)
    for entry in package.iterdir():
        if entry.name != "python":
            (home / entry.name).symlink_to(entry)
    for entry in (package / "python").iterdir():
        if entry.name != "lib":
            (home / "python" / entry.name).symlink_to(entry)
