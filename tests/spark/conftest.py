"""One Spark session for all tests: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Database
from tests.spark.cluster import Cluster
from tests.spark.lake import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.pollingDelay": "10ms",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All in one process of the test run: a second one would start a second Spark."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    pytest.importorskip("pyspark")
    from postbus.spark import session

    spark = session("tests", master="local[2]", memory="1g", config=SETTINGS)
    yield spark
    spark.stop()


@pytest.fixture
def bench(spark: SparkSession, db: Database) -> Bench:
    return Bench(spark, db)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers, for all tests that want them; drivers run in processes of their own."""
    pytest.importorskip("pyspark")
    with Cluster(tmp_path_factory.mktemp("cluster")).running() as cluster:
        yield cluster
