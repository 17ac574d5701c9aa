"""A Spark session of this process, set up from pip alone and quiet."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from postbus.errors import PostbusError
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

    Java comes from the system or from pip, see `postbus.spark._java`. Workers run this Python.

    Args:
        name: what the Spark UI calls the application.
        master: where to run; by default ``spark.master`` of the environment, else ``local[*]``.
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
    os.environ["JAVA_HOME"] = str(java_home())
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
    chosen = master or os.environ.get("MASTER") or "local[*]"
    if chosen.startswith("local"):
        # Names of machines can resolve to addresses that nobody answers on.
        settings.setdefault("spark.driver.host", "127.0.0.1")
        settings.setdefault("spark.driver.bindAddress", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(chosen)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


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
