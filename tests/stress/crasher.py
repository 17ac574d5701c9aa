"""A worker process that exists to be killed.

python -m tests.stress.crasher DSN GROUP ORDERING NAME SEED LOG
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.stress.actors import Worker
from tests.stress.oracle import Lines


def main() -> None:
    dsn, group, ordering, name, seed, log = sys.argv[1:]
    worker = Worker(dsn, name, int(seed), group=group, ordering=ordering)
    worker.sink = Lines(Path(log))

    def fault(text: str) -> None:
        Path(log).with_suffix(".fault").write_text(text, encoding="utf-8")

    worker.fault = fault
    print("ready", flush=True)
    while True:
        if not worker.step(calm=False):
            time.sleep(0.002)


if __name__ == "__main__":
    main()
