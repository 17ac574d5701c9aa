"""A driver in a process of its own: on the cluster, on Spark Connect, or to be killed.

python -m tests.spark.driver JOB, where JOB is JSON:
  master  where to run, local[2] for example
  config  settings of Spark
  dsn     the database
  out     a folder for checkpoints and lakes
  do      "walk" (tests/spark/flow.py; prints what it returns as one line of JSON) or a list of pipelines to
          run until somebody ends them (tests/spark/crash.py)
  max     events in a micro-batch of theirs
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postbus.spark import session
from tests.stress.actors import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}

# Spark gives a new Python process ten seconds to say that it is there, on a busy machine too. It ends a
# query as well as a kill does, so it is run again.
SLOW = "Python worker failed to connect back"


def end_with_the_test() -> None:
    """When the test run is gone, so are we and our JVM."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    end_with_the_test()
    faulthandler.register(signal.SIGUSR1)
    remote = job["master"].startswith("sc://")
    settings = {**({} if remote else SETTINGS), **job.get("config", {})}
    spark = session("driver", master=job["master"], memory="512m", config=settings)
    if job["do"] == "walk":
        from tests.spark.flow import walk

        with connect(job["dsn"], "walk") as c:
            print(json.dumps(walk(spark, c, job["dsn"], Path(job["out"]))))
        spark.stop()
    else:
        run(spark, job)


def run(spark: SparkSession, job: dict[str, Any]) -> None:
    """Several pipelines at once; the first that ends takes the driver with it."""
    from tests.spark import crash

    ends: queue.Queue[str] = queue.Queue()

    def one(what: str) -> None:
        while True:
            try:
                crash.run(spark, what, job["dsn"], Path(job["out"]), job["max"])
                ends.put(f"{what} has ended")
            except BaseException:
                said = traceback.format_exc()
                if SLOW not in said:
                    ends.put(f"{what}: {said}")
                    return
                print(f"{what}: once more: {SLOW}", file=sys.stderr, flush=True)

    for n, what in enumerate(job["do"], 1):
        threading.Thread(target=one, args=[what], daemon=True).start()
        # One after another: two cores are for all of them.
        end = time.monotonic() + 30
        while ends.empty() and time.monotonic() < end:
            if sum(query.lastProgress is not None for query in spark.streams.active) >= n:
                break
            time.sleep(0.1)
    print(ends.get(), file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
