"""``GET /healthz``: alive is who has lately heard from the database, not who has a process."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument
from postbus.worker._subscription import age

if TYPE_CHECKING:
    from postbus.worker._worker import Worker

LATE = 30.0  # seconds without an answer of the database


class Health:
    """A small HTTP server for probes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._server: asyncio.Server | None = None

    async def start(self, where: int | str) -> None:
        """Listen; a port alone is for probes of the same host.

        Raises:
            BadArgument: the port is taken, or is none.
        """
        host, _, port = str(where).rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise BadArgument(f"health must be a port or host:port, not {where!r}")
        try:
            self._server = await asyncio.start_server(self._answer, host or "127.0.0.1", int(port))
        except OSError as exc:
            raise BadArgument(
                f"the health endpoint cannot listen on {where}: {exc.strerror or exc}",
                hint="Choose another port; 0 takes any that is free.",
            ) from exc

    @property
    def port(self) -> int:
        """The port that it got."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._server.wait_closed()

    def report(self) -> dict[str, Any]:
        """What the answer says."""
        parts: list[dict[str, Any]] = [
            {
                "name": s.name,
                "last_fetch_seconds": _rounded(age(s.fetched_at)),
                "unanswered_seconds": _rounded(s.unanswered),
                "at_work": len(s.attempts),
                "handled": s.attempts.handled,
                "failed": s.attempts.failed,
                "problem": s.problem,
            }
            for s in self._worker.subscriptions
        ]
        return {
            "status": self._status(),
            "name": self._worker.name,
            "maintainer": self._worker.is_maintainer,
            "subscriptions": parts,
        }

    def _status(self) -> str:
        if self._worker.stopping:
            return "stopping"
        subscriptions = self._worker.subscriptions
        if any(s.problem is not None for s in subscriptions):
            return "problem"
        if any(s.unanswered > LATE for s in subscriptions):
            return "late"
        if not subscriptions or any(s.fetched_at is None for s in subscriptions):
            return "starting"
        return "ok"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                request = (await reader.readline()).decode("latin-1").split()
                while (await reader.readline()).strip():
                    pass
            known = len(request) > 1 and request[1].split("?")[0] in ("/healthz", "/")
            report = self.report() if known else {"status": "not found"}
            status = "404 Not Found" if not known else "200 OK"
            if known and report["status"] != "ok":
                status = "503 Service Unavailable"
            body = json.dumps(report).encode()
            writer.write(
                f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, OSError, ValueError):
            pass
        finally:
            writer.close()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
