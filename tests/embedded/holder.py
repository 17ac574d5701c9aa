"""A process that starts a server, says where it is, and holds it until its input ends.

Usage: python holder.py DATA_DIR|temporary
"""

from __future__ import annotations

import json
import sys

from postbus.embedded import Server


def main(where: str) -> None:
    server = Server.temporary() if where == "temporary" else Server(where)
    server.start()
    facts = {"pid": server.pid, "dsn": server.dsn, "data_dir": str(server.data_dir)}
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
