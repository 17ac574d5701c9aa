"""Functions that are called at certain times.

The engine fires each slot once, into a queue of the schedule's own; any worker that has the function takes
the message from there. What the function returns is sent in the transaction that acks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from postbus.client._async._bus import AsyncBus
from postbus.client._message import Message
from postbus.errors import BadArgument
from postbus.worker._handler import Handler

if TYPE_CHECKING:
    from postbus.worker._worker import Worker


class Cron:
    """One function with its times."""

    def __init__(
        self,
        function: Callable[..., Any],
        cron: str,
        *,
        queue: str | None,
        timezone: str,
        name: str | None,
        missed: str,
        timeout: float | None,
    ) -> None:
        self.function = function
        self.cron = cron
        self.queue = queue
        self.timezone = timezone
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.missed = missed
        self.timeout = timeout
        self.source = f"cron.{self.name}"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise BadArgument(f"the cron function {self.name} is a generator: calling it would do nothing")
        self._arguments = self._count()

    def _count(self) -> int:
        signature = inspect.signature(self.function)
        for count in (0, 1):
            try:
                signature.bind(*[None] * count)
            except TypeError:
                continue
            return count
        raise BadArgument(f"the cron function {self.name} takes nothing, or the message of its slot")

    def handler(self, worker: Worker) -> Handler:
        """What handles the slots of this one."""

        async def fire(m: Message[Any], conn: Any) -> None:
            result = await self._called(worker, m)
            if self.queue is not None and result is not None:
                queue = await worker.bus.queue(self.queue, serializer=worker.serializer)
                slot: dict[str, Any] = {k: m.headers[k] for k in ("schedule", "slot") if k in m.headers}
                await queue.send(result, headers=slot or None, conn=conn)

        fire.__qualname__ = self.name
        return Handler(
            function=fire, source=self.source, transactional=True, timeout=self.timeout, options={}
        )

    async def _called(self, worker: Worker, m: Message[Any]) -> Any:
        given = (m,) if self._arguments else ()
        if inspect.iscoroutinefunction(self.function):
            return await self.function(*given)
        result = await worker.calls.threads.run(self.function, *given)
        if inspect.isawaitable(result):
            raise TypeError(f"the cron function {self.name} returned an awaitable: use async def")
        return result

    async def install(self, bus: AsyncBus) -> None:
        """Make the queue and the schedule, or bring them up to date.

        Raises:
            NotFound: the queue for the results does not exist.
        """
        if self.queue is not None:
            await (await bus.queue(self.queue)).default_lease()
        await bus.create("queue", self.source, options={})
        query = (
            "select postbus.schedule(%s::text, %s::text, %s::text, '{}'::text, %s::text, missed => %s::text)"
        )
        await bus.fetch(query, (self.name, self.cron, self.source, self.timezone, self.missed))
