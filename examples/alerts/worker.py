"""Who acts on the alerts: `python -m examples.alerts.worker`."""

import logging
from typing import Any

from postbus import Message, Worker

worker = Worker()  # on $POSTBUS_DSN


# The lock and the ack commit together: an account is locked once for each alert.
@worker.queue("alerts", type="account.attacked", create=True, transactional=True)
def lock(m: Message[dict[str, Any]], conn: Any) -> None:
    conn.execute("create table if not exists locked (account text primary key, failed int, times int)")
    conn.execute(
        "insert into locked values (%s, %s, 1)"
        " on conflict (account) do update set failed = excluded.failed, times = locked.times + 1",
        (m.payload["account"], m.payload["failed"]),
    )


@worker.queue("alerts", type="session.ended")
def note(m: Message[dict[str, Any]]) -> None:
    p = m.payload
    seconds = (p["last"] - p["began"]) / 1000
    logging.info("%s: %d log-ins, %d failed, %.0f s", p["account"], p["logins"], p["failed"], seconds)


if __name__ == "__main__":
    worker.main()
