"""The worker: runs what was registered, and ends well."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeVar

import psycopg

from postbus.client._async._bus import AsyncBus
from postbus.client._connect import worker_name
from postbus.errors import BadArgument, PostbusError
from postbus.serializers import Serializer
from postbus.worker._calls import Calls
from postbus.worker._health import Health
from postbus.worker._maintainer import Maintainer
from postbus.worker._policy import Slots
from postbus.worker._registry import Registry
from postbus.worker._signals import Signals
from postbus.worker._sources import open_source, subscriptions_of
from postbus.worker._subscription import Subscription

log = logging.getLogger("postbus")

T = TypeVar("T")


class Worker(Registry):
    """Runs handlers for queues, streams and times.

    The first SIGTERM or SIGINT drains: nothing more is begun, what was taken but not begun is given back,
    handlers at work get `grace` seconds to end. The second one leaves at once. A database that goes away is
    waited for.

    Args:
        dsn: the database, as for `Bus`.
        name: what this worker is called in the database; default: host and process.
        concurrency: how many handlers run at a time in all; default: each as many as it says.
        priority: who comes first when `concurrency` is used up: ``strict`` goes by the order of registration,
            ``weighted`` takes turns by the handlers' `weight`.
        grace: seconds for handlers to end after the first signal. Most systems kill a process 30 seconds
            after it, so the default leaves some for the database to be told.
        health: a port (or ``host:port``) that answers ``GET /healthz``; default: none.
        maintain: take part in the upkeep of the database. One worker at a time does it.
        serializer: for handlers that have none of their own.
        install: put the engine into the database if it is not there.

    Example:
        >>> worker = Worker("postgresql://localhost/shop")
        >>> @worker.queue("emails", concurrency=8, max_attempts=5)
        ... async def send_email(m): ...
        >>> worker.main()  # doctest: +SKIP
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        name: str | None = None,
        concurrency: int | None = None,
        priority: Literal["strict", "weighted"] = "strict",
        grace: float = 25.0,
        health: int | str | None = None,
        maintain: bool = True,
        serializer: Serializer | None = None,
        install: bool = False,
    ) -> None:
        super().__init__(serializer)
        if priority not in ("strict", "weighted"):
            raise BadArgument(f"priority is 'strict' or 'weighted', not {priority!r}")
        if concurrency is not None and concurrency < 1:
            raise BadArgument(f"concurrency must be at least 1, not {concurrency}")
        if not grace >= 0:
            raise BadArgument(f"grace must be at least 0, not {grace}")
        self.dsn = dsn
        self.name = name or worker_name()
        self.concurrency = concurrency
        self.priority = priority
        self.grace = grace
        self.health = health
        self.maintain = maintain
        self.install = install
        self.slots: Slots | None = None
        self.subscriptions: list[Subscription] = []
        self._bus: AsyncBus | None = None
        self._calls: Calls | None = None
        self._maintainer: Maintainer | None = None
        self._health: Health | None = None
        self._early = False  # a signal came before `run`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def main(self) -> None:
        """Run until a signal comes; for scripts. Errors of the set-up end the process with exit code 1."""
        log_to_stderr(logging.INFO)
        try:
            with self.signals():
                asyncio.run(self.run())
        except (PostbusError, psycopg.Error) as exc:
            sys.exit(f"error: {exc}")

    async def run(self, *, signals: bool = False) -> None:
        """Run until `stop` is called or, with `signals`, until a signal comes.

        Being cancelled ends it too, without grace.
        """
        if self._loop is not None:
            raise BadArgument("the worker is running already")
        if not self.handlers:
            raise BadArgument(
                "the worker has no handlers", hint='Decorate a function: @worker.queue("emails").'
            )
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._early:
            self._stop.set()
        try:
            with self.signals() if signals else nullcontext():
                await self._run(subscriptions_of(self.handlers))
        finally:
            self._loop = self._stop = None

    def stop(self) -> None:
        """Drain and end; from any thread."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(stop.set)

    @property
    def stopping(self) -> bool:
        """Whether nothing more is begun."""
        return self._stop is None or self._stop.is_set()

    @property
    def bus(self) -> AsyncBus:
        """The bus of the running worker: for handlers on the loop that send."""
        return _running(self._bus)

    @property
    def calls(self) -> Calls:
        """For the worker's own parts: threads, processes and connections of handlers."""
        return _running(self._calls)

    @property
    def is_maintainer(self) -> bool:
        """Whether this is the worker that does the upkeep of the database."""
        return self._maintainer is not None and self._maintainer.elected

    @property
    def health_port(self) -> int | None:
        """The port of the health endpoint, while the worker runs."""
        return None if self._health is None else self._health.port

    def signals(self) -> Signals:
        """For scripts: while it is open, signals end the worker."""

        def first(number: int) -> None:
            loop = self._loop
            if loop is None:
                self._early = True  # it will not begin; or has just ended
                return
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_signal, number)

        def last() -> None:
            if self._calls is not None:
                self._calls.kill()

        return Signals(first, last, self.grace)

    def _on_signal(self, number: int) -> None:
        log.info("%s: ending within %g seconds", signal.Signals(number).name, self.grace)
        self.stop()

    async def _run(self, groups: list[list[Any]]) -> None:
        """From the first connection to the last."""
        strict = self.priority == "strict"
        self.slots = None if self.concurrency is None else Slots(self.concurrency, strict=strict)
        self._health = Health(self) if self.health is not None else None
        self._bus = bus = AsyncBus(
            self.dsn,
            name=self.name,
            pool_size=3 + 2 * len(groups),
            serializer=self.serializer,
            install=self.install,
        )
        grace = self.grace
        try:
            if self._health is not None and self.health is not None:
                await self._health.start(self.health)
            await self._persist(bus.open)
            await self._begin(bus, groups)
            assert self._stop is not None
            await self._stop.wait()
        except _Stopped:
            pass
        except asyncio.CancelledError:
            grace = 0.0
            raise
        finally:
            await self._end(bus, grace)

    async def _begin(self, bus: AsyncBus, groups: list[list[Any]]) -> None:
        """Check that everything is there, and start."""
        self._calls = calls = Calls(str(bus.pool.conninfo), self.handlers)
        await self._persist(calls.open)
        crons = {cron.source for cron in self.crons}
        for handlers in groups:
            if handlers[0].source not in crons:
                await self._persist(lambda h=handlers: open_source(bus, h))  # type: ignore[misc]
        for cron in self.crons:
            await self._persist(lambda c=cron: c.install(bus))  # type: ignore[misc]
        self.subscriptions = [Subscription(self, calls, h, n) for n, h in enumerate(groups)]
        for subscription in self.subscriptions:
            subscription.start()
        if self.maintain:
            self._maintainer = Maintainer(bus)
            self._maintainer.start()
        log.info("worker %s: %s", self.name, ", ".join(s.name for s in self.subscriptions))

    async def _end(self, bus: AsyncBus, grace: float) -> None:
        assert self._stop is not None
        self._stop.set()
        for subscription in self.subscriptions:
            subscription.stop()
        late = sum(await asyncio.gather(*(s.finish(grace) for s in self.subscriptions)))
        if late:
            log.warning("%d handlers did not end in time; their messages come again", late)
        if self._maintainer is not None:
            await self._maintainer.stop()
        if self._calls is not None:
            await self._calls.close()
        await bus.close()
        if self._health is not None:
            await self._health.stop()
        self._bus = self._calls = self._maintainer = self._health = None
        self.subscriptions = []

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Do something however long the database is away; what is wrong for good is raised."""
        assert self._stop is not None
        pause = 0.2
        while True:
            if self._stop.is_set():
                raise _Stopped
            try:
                return await call()
            except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
                log.warning("no connection, trying again: %s", str(exc).strip())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.5, 1)):  # noqa: S311 - not a secret
                    await self._stop.wait()
            pause = min(5.0, pause * 2)


def log_to_stderr(level: int | str) -> None:
    """For scripts that do not set up logging themselves."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # What it has to say about a server that is away, the worker says too, and less often.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


class _Stopped(Exception):  # noqa: N818 - for ourselves
    """`stop` was called before everything had begun."""


def _running(part: T | None) -> T:
    if part is None:
        raise BadArgument("the worker is not running", hint="Use a Bus of your own outside of handlers.")
    return part
