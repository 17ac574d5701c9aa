"""On a real cluster: the same results as on this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Database
from tests.spark.cluster import SETTINGS, Cluster, walked
from tests.spark.flow import expected, prepare, walk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def test_local(spark: SparkSession, db: Database, tmp_path: Path) -> None:
    c = db.connect()
    prepare(c)
    assert walk(spark, c, db.dsn, tmp_path) == expected()


def test_a_standalone_cluster(cluster: Cluster, db: Database, tmp_path: Path) -> None:
    prepare(db.connect())
    job = {"master": cluster.url, "config": SETTINGS, "dsn": db.dsn, "out": str(tmp_path)}
    assert walked(job, cluster.env) == expected()
    # It was not the driver that did the work.
    logs = list(cluster.folder.glob("worker-*/app-*/*/stderr"))
    assert len({log.parts[-4] for log in logs}) == 2, "executors of both workers"
