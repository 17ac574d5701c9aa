"""Python processes of Spark import from the installed package, which is compiled, not from a zip."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark")
from postbus.spark._home import spark_home


def test_where_tasks_import_from(spark: SparkSession) -> None:
    def where(_: int) -> tuple[str, str]:
        import py4j  # type: ignore[import-untyped]
        import pyspark

        return str(pyspark.__file__), str(py4j.__file__)

    (found,) = spark.sparkContext.parallelize([1], 1).map(where).collect()
    for file in found:
        assert Path(file).is_file(), "in a zip"


def test_made_once_and_never_over_one_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    home = spark_home(tmp_path)
    assert home is not None
    assert (home / "bin" / "spark-submit").is_file()
    assert (home / "python" / "lib" / "pyspark.zip" / "pyspark" / "daemon.py").is_file()
    assert spark_home(tmp_path) == home
    assert list(tmp_path.iterdir()) == [home]
    (tmp_path / "file").write_text("")
    assert spark_home(tmp_path / "file") is None, "no cache, no gain"
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert spark_home(tmp_path) is None
