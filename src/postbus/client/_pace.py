"""How long consumers wait, and for what."""

from __future__ import annotations

IDLE = 1.0  # how long to wait for a notification before looking anyway
AGAIN = 0.015  # how long after the first look in vain: the engine notifies at most once in 10 ms
POLL = 0.05  # where there are no notifications: at first, then twice as long each time up to IDLE

CLOSE = 10.0  # a close does not wait longer for a database that is away
CLOSE_LOOK = 0.1  # how often it looks whether it waits in vain


def pause(listening: bool | None, empty: int, due: float | None) -> float:
    """Seconds to wait, after so many looks in a row that found nothing.

    Args:
        listening: whether notifications arrive, as far as is known.
        empty: how many looks, since something was found or a notification came.
        due: in how many seconds the next message is due, as far as is known.
    """
    if empty == 1:
        # What was sent right after the last notification had none of its own.
        wait = AGAIN
    elif listening:
        wait = IDLE
    else:
        wait = min(IDLE, POLL * 2 ** min(empty - 2, 8))
    if due is not None:
        # Due, and yet not to be had: somebody has it just now, or its key is blocked.
        wait = min(wait, max(due, 0.002 * 2 ** min(empty, 9)))
    return wait
