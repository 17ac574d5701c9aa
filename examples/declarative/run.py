"""Run the pipeline: `python -m examples.declarative.run FOLDER`, as often as there is something new.

It makes the folder a project, with all that Spark keeps in it, and calls `spark-pipelines run` there with the
Java that postbus finds.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from postbus.spark._java import java_home

HERE = Path(__file__).parent


def lay_out(folder: Path) -> None:
    """Copy the project into a folder, and say in its spec which folder that is."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("conf", "transformations"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(HERE / part, folder / part, dirs_exist_ok=True, ignore=ignore)
    spec = (HERE / "spark-pipeline.yml").read_text()
    (folder / "spark-pipeline.yml").write_text(spec.replace("FOLDER", str(folder)))


def environment(folder: Path) -> dict[str, str]:
    """What the scripts of Spark go by."""
    return os.environ | {
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(folder / "conf"),
        "PYTHONWARNINGS": "ignore:Failed to set:UserWarning",  # of settings that the server has already
    }


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "orders_pipeline").resolve()
    lay_out(folder)
    command = Path(sys.executable).with_name("spark-pipelines")
    return subprocess.run([command, "run"], cwd=folder, env=environment(folder), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
