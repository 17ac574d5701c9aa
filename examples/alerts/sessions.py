"""Sessions of log-ins, one account at a time, with state that outlives restarts."""

import json
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

OUTPUT = "type string, key string, payload string"  # rows of the sink: messages


class Sessions(StatefulProcessor):
    """Log-ins of an account belong to one session while no more than `gap` lies between them.

    An alert goes out with the failed log-in that makes `limit` of them in a session, and a summary when the
    session is over: when time has passed the gap, as far as the watermark tells.
    """

    def __init__(self, gap_seconds: int, limit: int) -> None:
        self.gap = gap_seconds * 1000
        self.limit = limit

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        # Of the session that is open: milliseconds since 1970, and counts.
        self.open = handle.getValueState("open", "began long, last long, logins long, failed long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803
        (account,) = key
        state = self.open.get()
        before = state
        # Those of one batch come in any order.
        for row in sorted(rows, key=lambda r: (r.ms, r.id)):
            if state is not None and row.ms > state[1] + self.gap:
                yield summary(account, state)
                state = None
            began, last, logins, failed = state or (row.ms, row.ms, 0, 0)
            is_failed = row.type == "login.failed"
            state = (min(began, row.ms), max(last, row.ms), logins + 1, failed + is_failed)
            if is_failed and state[3] == self.limit:
                yield message("account.attacked", account, state)
        if state is None:
            return
        self.open.update(state)
        if before is not None:
            self.handle.deleteTimer(before[1] + self.gap)
        self.handle.registerTimer(state[1] + self.gap)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[Row]:
        state = self.open.get()
        if state is not None:
            yield summary(key[0], state)
            self.open.clear()


def summary(account: str, state: tuple[Any, ...]) -> Row:
    return message("session.ended", account, state)


def message(type: str, account: str, state: tuple[Any, ...]) -> Row:
    names = ("began", "last", "logins", "failed")
    body = {"account": account, **{n: int(v) for n, v in zip(names, state, strict=True)}}
    return Row(type=type, key=account, payload=json.dumps(body))
