"""LISTEN as a hint: one thread and one connection per bus, for all its queues and streams.

The engine notifies the channel ``postbus.<name>`` when something was sent. A thread with a plain connection
serves blocking and asynchronous buses alike: callbacks only set events. What is heard is a hint, and may be
lost; consumers ask the database at least once a second anyway.

Through a pooler in transaction mode LISTEN succeeds and nothing ever arrives. So the first thing a new
listener does is to have itself notified, by another connection: what a session sends to itself comes back
with the answer, also through a pooler. When nothing comes, consumers poll instead, and one line in the log
says so.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

log = logging.getLogger("postbus")

_SELF_TEST_SECONDS = 3.0
_RECONNECT_SECONDS = (0.1, 5.0)
_PROBE_SECONDS = 60.0
_PREFIX = "postbus."


class Listener:
    """Calls back when a queue or stream has news.

    Args:
        dsn: where to connect.

    Attributes:
        works: whether notifications arrive; None: not known yet.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._lock = threading.Lock()
        self._callbacks: dict[str, set[Callable[[], None]]] = {}
        self._listening: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._wake_r = self._wake_w = -1
        self._pause = _RECONNECT_SECONDS[0]
        self.works: bool | None = None

    def subscribe(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called, from another thread, when `name` has news. Returns what ends it."""
        with self._lock:
            self._callbacks.setdefault(name, set()).add(callback)
            if self._thread is None and not self._stop and self.works is not False:
                self._wake_r, self._wake_w = os.pipe()
                os.set_blocking(self._wake_r, False)
                os.set_blocking(self._wake_w, False)
                self._thread = threading.Thread(target=self._run, name="postbus-listener", daemon=True)
                self._thread.start()
        self._poke()

        def unsubscribe() -> None:
            with self._lock:
                left = self._callbacks.get(name, set())
                left.discard(callback)
                if not left:
                    self._callbacks.pop(name, None)

        return unsubscribe

    def close(self) -> None:
        """End the thread and its connection."""
        self._stop = True
        self._poke()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)  # it may be waiting for a server that does not answer: it ends after that

    def _poke(self) -> None:
        with self._lock, suppress(OSError):
            if self._wake_w >= 0:
                os.write(self._wake_w, b"x")

    def _run(self) -> None:
        try:
            while not self._stop:
                try:
                    self._listen()
                    return
                except Exception as exc:
                    log.debug("listener: %s", exc)
                # Whoever waits should look for itself meanwhile.
                self._tell_all()
                self._wait(None, random.uniform(0.5, 1) * self._pause)  # noqa: S311 - not a secret
                self._pause = min(_RECONNECT_SECONDS[1], self._pause * 2)
        finally:
            with self._lock:
                os.close(self._wake_r)
                os.close(self._wake_w)
                self._wake_r = self._wake_w = -1
                self._thread = None

    def _listen(self) -> None:
        """Serve one connection until it breaks (raises), or until there is no more need (returns)."""
        with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None) as conn:
            self._listening = set()
            self.works = self._hears(conn)
            if not self.works:
                log.warning(
                    "LISTEN does not work on this connection (a pooler in transaction mode?): "
                    "consumers poll instead; give Bus a DSN that goes to PostgreSQL itself for lower latency"
                )
                self._tell_all()
                return
            self._pause = _RECONNECT_SECONDS[0]
            while not self._stop:
                self._listen_to_new(conn)
                # Also those that came with the answer to another statement.
                for name in {n.channel.removeprefix(_PREFIX) for n in conn.notifies(timeout=0)}:
                    self._tell(name)
                if not self._wait(conn, _PROBE_SECONDS):
                    conn.execute("select 1")  # who only reads never finds out that the server is gone

    def _wait(self, conn: psycopg.Connection[Any] | None, seconds: float) -> bool:
        """Wait for something to read, or for a poke; returns whether there was one of them."""
        poll = select.poll()  # unlike select() it takes any descriptor
        poll.register(self._wake_r, select.POLLIN)
        if conn is not None:
            poll.register(conn.fileno(), select.POLLIN)
        ready = poll.poll(max(0.0, seconds) * 1000)
        with suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        return bool(ready)

    def _hears(self, conn: psycopg.Connection[Any]) -> bool:
        channel = f"postbus_test_{uuid.uuid4().hex}"
        conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=None) as other:
            other.execute("select pg_notify(%s, '')", (channel,))
        end = time.monotonic() + _SELF_TEST_SECONDS
        heard = False
        while not heard and not self._stop and (left := end - time.monotonic()) > 0:
            self._wait(conn, left)
            heard = any(n.channel == channel for n in conn.notifies(timeout=0))
        conn.execute(sql.SQL("unlisten {}").format(sql.Identifier(channel)))
        return heard or self._stop

    def _listen_to_new(self, conn: psycopg.Connection[Any]) -> None:
        with self._lock:
            wanted = set(self._callbacks)
        for name in wanted - self._listening:
            conn.execute(sql.SQL("listen {}").format(sql.Identifier(_PREFIX + name)))
            self._listening.add(name)
            self._tell(name)  # what came before we listened
        for name in self._listening - wanted:
            conn.execute(sql.SQL("unlisten {}").format(sql.Identifier(_PREFIX + name)))
            self._listening.discard(name)

    def _tell(self, name: str) -> None:
        with self._lock:
            callbacks = list(self._callbacks.get(name, ()))
        for callback in callbacks:
            with suppress(RuntimeError):  # its event loop has been closed
                callback()

    def _tell_all(self) -> None:
        with self._lock:
            names = list(self._callbacks)
        for name in names:
            self._tell(name)
