"""A worker process that exists to be killed.

python -m tests.queue_stress.crasher DSN QUEUE NAME SEED
"""

from __future__ import annotations

import sys
import time

from tests.queue_stress.workers import Worker


def main() -> None:
    dsn, queue, name, seed = sys.argv[1:]
    worker = Worker(dsn, name, int(seed), queue=queue)
    print("ready", flush=True)
    while True:
        if not worker.step(calm=False):
            time.sleep(0.002)


if __name__ == "__main__":
    main()
