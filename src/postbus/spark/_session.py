"""A Spark session of this process, set up from pip alone and quiet."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from postbus.errors import PostbusError
from postbus.spark._home import spark_home
from postbus.spark._java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Errors only; what ends a query is raised in Python anyway.
_LOG4J = """\
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
logger.repl.name = org.apache.spark.api.python.PythonGatewayServer
logger.repl.level = {level}
appender.console.type = Console
appender.console.name = stderr
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
"""


def session(
    name: str = "postbus",
    *,
    master: str | None = None,
    memory: str | None = None,
    config: Mapping[str, str] | None = None,
    log_level: str = "off",
) -> SparkSession:
    """The Spark session of this process: the one there is, or a new one on this machine.

    Java comes from the system or from pip, see `postbus.spark._java`. Workers run this Python. A session of
    Spark Connect needs neither here: with it, `memory` and `log_level` are the server's to choose.

    Args:
        name: what the Spark UI calls the application.
        master: where to run, ``spark://host:7077`` for example, or ``sc://host:15002`` for Spark Connect; by
            default what the environment says in ``SPARK_REMOTE`` or ``MASTER``, else ``local[*]``.
        memory: of the driver, ``2g`` for example. In a local session that is all there is.
        config: settings of Spark, which win over those made here.
        log_level: what Spark may print: ``off``, ``error``, ``warn`` or ``info``.

    Raises:
        PostbusError: pyspark or Java is missing.

    Example:
        >>> spark = session(memory="2g", config={"spark.sql.shuffle.partitions": "8"})  # doctest: +SKIP
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as exc:
        raise PostbusError("pyspark is not installed", hint="pip install 'postbus[spark]'") from exc
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    chosen = where(master)
    if chosen.startswith("sc://"):
        return _remote(chosen, name, config or {})
    java = java_home()
    os.environ["JAVA_HOME"] = str(java)
    home = spark_home(java.parent) if chosen.startswith(("local", "spark://")) else None
    if home is not None:
        os.environ["SPARK_HOME"] = str(home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    quiet = f"-Dlog4j2.configurationFile=file:{_log4j(log_level)}"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        **({"spark.driver.memory": memory} if memory else {}),
        **(config or {}),
    }
    java_options = "spark.driver.extraJavaOptions"
    settings[java_options] = f"{quiet} {(config or {}).get(java_options, '')}".strip()
    if chosen.startswith("local"):
        # Names of machines can resolve to addresses that nobody answers on.
        settings.setdefault("spark.driver.host", "127.0.0.1")
        settings.setdefault("spark.driver.bindAddress", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(chosen)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return activate(builder.getOrCreate())


def activate(spark: SparkSession) -> SparkSession:
    """Make a session the active one of this thread.

    Each thread has its own, and Spark looks for the source ``postbus`` by the active session alone: without
    one, a query that is started in a thread of its own does not find its sink.
    """
    if spark.getActiveSession() is None:
        spark.createDataFrame([], "nothing int")  # as a side effect, since ever
    return spark


def where(master: str | None) -> str:
    """Where to run: what was asked for, else what the environment says, else this machine."""
    remote = os.environ.get("SPARK_REMOTE")
    chosen = master or remote or os.environ.get("MASTER") or "local[*]"
    if remote and not chosen.startswith("sc://"):
        # Spark would go by the variable for some of its functions and by the master for others.
        raise PostbusError(
            f"cannot run on {chosen} while SPARK_REMOTE is {remote}",
            hint="Unset SPARK_REMOTE, or leave out master. Addresses of Spark Connect begin with sc://.",
        )
    return chosen


def _remote(url: str, name: str, config: Mapping[str, str]) -> SparkSession:
    """A session of Spark Connect. Java, memory and logs are the server's."""
    from pyspark.sql import SparkSession

    try:
        builder = SparkSession.builder.remote(url)
        for key, value in {"spark.sql.session.timeZone": "UTC", **config}.items():
            builder = builder.config(key, value)
        return builder.appName(name).getOrCreate()
    except ImportError as exc:
        raise PostbusError(
            f"Spark Connect ({url}) needs more packages: {exc}", hint="pip install 'postbus[connect]'"
        ) from exc


def _log4j(level: str) -> Path:
    if level not in ("off", "error", "warn", "info"):
        raise PostbusError(f"log_level must be off, error, warn or info, not {level!r}")
    folder = Path(tempfile.gettempdir()) / f"postbus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"log4j2-{level}.properties"
    text = _LOG4J.format(level=level)
    if not file.exists() or file.read_text() != text:
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(text)
        made.replace(file)
    return file
