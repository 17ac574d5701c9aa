"""What is left of Spark's errors: the sentence that a person needs."""

from __future__ import annotations

import pytest

from postbus.errors import BadArgument, PostbusError
from postbus.pipelines._explain import explain

OURS = """[STREAM_FAILED] Query [id = 97, runId = 9c] terminated with exception: Failed when Python \
streaming data source perform latestOffset: Traceback (most recent call last):
  File "_source.py", line 382, in _known
    raise BadArgument(
postbus.errors.BadArgument: the checkpoint belongs to stream 'orders', which this query does not read
It reads other. Use another checkpointLocation, or the old streams.
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 97, runId = 9c]
Current Committed Offsets: {}
"""
TASK = """Job aborted due to stage failure: Task 0 in stage 3.0 failed, most recent failure: Lost task:
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
postbus.errors.PostbusError: the disk of /lake is full
Make room, then run it again.

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:1)
"""
PYTHON = """[STREAM_FAILED] Query terminated: Traceback (most recent call last):
  File "encoder.py", line 46, in write_int
TypeError: unsupported operand type(s) for <<: 'datetime.date' and 'int'
 SQLSTATE: 38000
"""
JAVA = """An error occurred while calling o59.start.
: java.io.IOException: mkdir of file:/lake/_postbus failed
\tat org.apache.hadoop.fs.FileSystem.primitiveMkdir(FileSystem.java:1)
Caused by: java.io.FileNotFoundException: /lake: No space left on device
"""


@pytest.mark.parametrize(
    ("text", "kind", "message", "hint"),
    [
        (OURS, BadArgument, "the checkpoint belongs to stream 'orders', which this query does not read",
            "It reads other. Use another checkpointLocation, or the old streams."),
        (TASK, PostbusError, "the disk of /lake is full", "Make room, then run it again."),
        (PYTHON, PostbusError,
            "Spark failed: TypeError: unsupported operand type(s) for <<: 'datetime.date' and 'int'",
            "Run the pipeline again: it goes on where it was."),
        (JAVA, PostbusError,
            "the disk is full: FileNotFoundException: /lake: No space left on device",
            "Make room and run the pipeline again: it goes on where it was."),
        ("", PostbusError, "Spark failed: Py4JError", "Run the pipeline again: it goes on where it was."),
    ],
    ids=["ours", "ours in a task", "python", "java", "nothing"],
)  # fmt: skip
def test_errors_of_spark(text: str, kind: type[PostbusError], message: str, hint: str) -> None:
    error = explain(text, "Py4JError")
    assert type(error) is kind
    assert (error.message, error.hint) == (message, hint)
