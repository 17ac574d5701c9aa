"""One Spark session for all tests: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Database
from tests.spark.lake import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.pollingDelay": "10ms",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}


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
