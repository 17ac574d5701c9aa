"""A standalone cluster of Spark from pip alone, on this machine: a master and two workers, to be killed.

Every process is started by a shell that waits for the end of its input: so they end with the test run,
however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"
# Executors so small that both workers are needed, and failures that are noticed at once.
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}
# The process, its id on the first line; it is killed when our end of the pipe is closed.
GUARD = '"$@" </dev/null & echo $!; read _; kill -9 $! 2>/dev/null'


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def until(true: Callable[[], Any], what: str, seconds: float = 90.0, log: Path | None = None) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}\n{log.read_text() if log else ''}"
        time.sleep(0.02)


@contextmanager
def guarded(command: list[str], log: Path, env: dict[str, str]) -> Iterator[int]:
    """A process that ends with the block, or with this process; its pid. What it says goes into the log."""
    with log.open("a") as out:
        guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            env={**os.environ, **env},
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for the test run, which then ends us in order
        )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        yield int(guard.stdout.readline())
    finally:
        guard.stdin.close()
        guard.wait(30)
        guard.stdout.close()


def environment(folder: Path) -> dict[str, str]:
    """For every process of the cluster: our Java, our Python, loopback, nothing of this machine's Spark."""
    from postbus.spark._home import spark_home
    from postbus.spark._java import java_home
    from postbus.spark._session import _log4j

    java = java_home()
    return {
        "SPARK_HOME": str(spark_home(java.parent) or os.environ["SPARK_HOME"]),
        "SPARK_CONF_DIR": str(folder),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{JAVA_OPTIONS} -Dlog4j2.configurationFile=file:{_log4j('error')}",
        "JAVA_HOME": str(java),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": PYTHONPATH,
    }


class Cluster:
    """One master, two workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment(folder)
        self.url = f"spark://127.0.0.1:{free_port()}"
        self._web = free_port()
        self._stack = ExitStack()
        self.workers: list[int] = []

    @contextmanager
    def running(self) -> Iterator[Cluster]:
        with self._stack:
            self._start("master.Master", "--port", self.url.rpartition(":")[2], "--webui-port", self._web)
            for _ in range(2):
                self.start_worker(wait=False)
            self.wait_for_workers()
            yield self

    def _start(self, what: str, *arguments: object) -> int:
        command = [f"{self.env['SPARK_HOME']}/bin/spark-class", f"org.apache.spark.deploy.{what}"]
        command += ["--host", "127.0.0.1", *map(str, arguments)]
        return self._stack.enter_context(guarded(command, self.folder / "cluster.log", self.env))

    def start_worker(self, *, wait: bool = True) -> None:
        work = self.folder / f"worker-{len(list(self.folder.glob('worker-*')))}"
        work.mkdir()
        self.workers.append(
            self._start("worker.Worker", "--cores", 1, "--memory", "640m", "--webui-port", 0,
                        "--work-dir", work, self.url)
        )  # fmt: skip
        if wait:
            self.wait_for_workers()

    def state(self) -> dict[str, Any]:
        """What the master knows. For a moment after its start it answers with a page instead."""
        address = f"http://127.0.0.1:{self._web}/json/"
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(address) as r:
            found: dict[str, Any] = json.load(r)
            return found
        return {}

    def wait_for_workers(self) -> None:
        def alive() -> bool:
            states = [str(w["state"]) for w in self.state().get("workers", [])]
            return states.count("ALIVE") == len(self.workers)

        until(alive, f"{len(self.workers)} workers", log=self.folder / "cluster.log")

    def executors(self) -> list[int]:
        """The processes in which tasks run."""
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        found = []
        for line in listed.stdout.splitlines():
            pid, parent, command = line.split(None, 2)
            if int(parent) in self.workers and "CoarseGrainedExecutorBackend" in command:
                found.append(int(pid))
        return sorted(found)

    def kill_executor(self, which: int = 0) -> int:
        """Kill one that runs; its worker starts another."""
        until(self.executors, "an executor")
        there = self.executors()
        victim = there[which % len(there)]
        os.kill(victim, signal.SIGKILL)
        return victim

    def kill_worker(self, which: int = 0) -> int:
        """Kill a worker. Its executors see that and end; no other takes their place."""
        victim = self.workers.pop(which % len(self.workers))
        os.kill(victim, signal.SIGKILL)
        return victim


@contextmanager
def driver(job: dict[str, Any], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A driver with its JVM and Python workers, in a process group of their own, and driver.log."""
    with Path(job["out"], "driver.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.driver", json.dumps(job)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def walked(job: dict[str, Any], env: dict[str, str]) -> Any:
    """What the walk of tests/spark/flow.py returns in a driver."""
    with driver({**job, "do": "walk"}, env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, Path(job["out"], "driver.log").read_text()[-5000:]
        return json.loads(line)


@contextmanager
def connect_server(cluster: Cluster) -> Iterator[str]:
    """A Spark Connect server on top of a cluster; its address for clients."""
    port = free_port()
    settings = {
        **SETTINGS,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraJavaOptions": cluster.env["SPARK_DAEMON_JAVA_OPTS"],
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    command = [f"{cluster.env['SPARK_HOME']}/bin/spark-submit", "--master", cluster.url]
    command += [word for k, v in settings.items() for word in ("--conf", f"{k}={v}")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]

    def listens() -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    log = cluster.folder / "connect.log"
    with guarded(command, log, {**cluster.env, "SPARK_DAEMON_MEMORY": "512m"}):
        until(listens, "a Connect server", log=log)
        yield f"sc://127.0.0.1:{port}"
