"""Through Spark Connect: the client has no JVM, the server runs on the cluster, the results are the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.errors import PostbusError
from tests.conftest import Database
from tests.spark.cluster import Cluster, connect_server, walked
from tests.spark.flow import expected, prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def remote(cluster: Cluster) -> Iterator[str]:
    pytest.importorskip("grpc")
    with connect_server(cluster) as address:
        yield address


def test_spark_connect(remote: str, db: Database, tmp_path: Path) -> None:
    prepare(db.connect())
    # Neither Java nor a Spark of its own: what runs, runs on the server.
    nothing = {"JAVA_HOME": "/nowhere", "SPARK_HOME": "/nowhere", "SPARK_REMOTE": remote}
    assert walked({"master": remote, "dsn": db.dsn, "out": str(tmp_path)}, nothing) == expected()


def test_a_master_beside_a_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    from postbus.spark._session import where

    monkeypatch.setitem(os.environ, "SPARK_REMOTE", "sc://somewhere:15002")
    assert where(None) == "sc://somewhere:15002"
    assert where("sc://elsewhere") == "sc://elsewhere"
    with pytest.raises(PostbusError, match="SPARK_REMOTE"):
        where("local[2]")
    monkeypatch.delenv("SPARK_REMOTE")
    monkeypatch.setenv("MASTER", "spark://there:7077")
    assert where(None) == "spark://there:7077"
    monkeypatch.delenv("MASTER")
    assert where(None) == "local[*]"
