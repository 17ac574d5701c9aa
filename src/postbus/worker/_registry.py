"""What a worker does, by decorators: handlers for queues and streams, functions for times, middleware."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from postbus.errors import BadArgument
from postbus.serializers import Serializer
from postbus.worker._cron import Cron
from postbus.worker._handler import Handler, Middleware
from postbus.worker._policy import Backoff

if TYPE_CHECKING:
    from postbus.worker._worker import Worker

F = TypeVar("F", bound=Callable[..., Any])


class Registry:
    """The registering side of a `Worker`."""

    def __init__(self, serializer: Serializer | None) -> None:
        self.serializer = serializer
        self.middleware: list[Middleware] = []
        self.handlers: list[Handler] = []
        self.crons: list[Cron] = []

    def queue(
        self,
        name: str,
        *,
        type: str | None = None,
        concurrency: int = 1,
        prefetch: int | None = None,
        lease: float | None = None,
        rate: float | None = None,
        burst: int | None = None,
        timeout: float | None = None,
        backoff: Backoff | None = None,
        max_attempts: int | None = None,
        transactional: bool = False,
        manual_ack: bool = False,
        process: bool = False,
        weight: int = 1,
        create: bool = False,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Handle the messages of a queue.

        A handler that returns has done its work: the message is acked. One that raises has not: the message
        comes again, or goes to the dead letters. `Retry` and `GiveUp` say it in so many words.

        Args:
            name: of the queue.
            type: only messages of this type. A handler without one gets those that no other handler is for.
            concurrency: how many at a time. Plain functions run in threads, coroutines on the loop.
            prefetch: how many to have on leases at a time; default: twice `concurrency`. More is faster where
                messages are small, and takes more away from other workers.
            lease: seconds; default: that of the queue. Leases are extended while handlers run, so this is how
                soon others get the messages of a worker that died.
            rate: messages a second, at the most, of this worker.
            burst: how many of them at once; default: those of one second.
            timeout: seconds for one message. A thread cannot be stopped: it is left to itself.
            backoff: how long failed messages wait; default: the backoff of the queue.
            max_attempts: after so many the message goes to the dead letters. The queue has a limit too; one
                that is made here gets this one.
            transactional: the handler gets a connection too, and its transaction and the ack commit together.
            manual_ack: the handler finishes its messages itself, in a transaction of its own for example. A
                message that it does not finish comes again when its lease ends.
            process: run in another process; for work that keeps a processor busy.
            weight: the share of turns, with ``Worker(priority="weighted")``.
            create: make the queue if it does not exist, with the other `options`.
            serializer: for its payloads.
            options: for a queue that is made.
        """

        def register(function: F) -> F:
            self.handlers.append(
                Handler(
                    function=function,
                    source=name,
                    type=type,
                    concurrency=concurrency,
                    prefetch=prefetch,
                    lease=lease,
                    rate=rate,
                    burst=burst,
                    timeout=timeout,
                    backoff=backoff,
                    max_attempts=max_attempts,
                    transactional=transactional,
                    manual_ack=manual_ack,
                    process=process,
                    weight=weight,
                    create=create,
                    serializer=serializer or self.serializer,
                    options=options,
                )
            )
            return function

        return register

    def stream(
        self,
        name: str,
        *,
        group: str,
        type: str | None = None,
        concurrency: int = 1,
        prefetch: int | None = None,
        lease: float | None = None,
        rate: float | None = None,
        burst: int | None = None,
        timeout: float | None = None,
        backoff: Backoff | None = None,
        max_attempts: int | None = None,
        transactional: bool = False,
        manual_ack: bool = False,
        process: bool = False,
        weight: int = 1,
        create: bool = True,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Handle the events of a stream, as a group.

        The arguments are those of `queue`, and these. Several handlers may share a group, each with a
        `type`: events that no handler is for are done with. In a group with an order, events of one key are
        handled one after the other, whatever the concurrency; when one fails, those behind it wait for it.

        Args:
            name: of the stream.
            group: the group. It is made if it does not exist, unless `create` is False.
            type: only events of this type.
            concurrency: how many at a time.
            prefetch: how many to have on leases at a time; default: 200, or twice `concurrency`.
            lease: seconds; default: that of the group.
            rate: events a second, at the most.
            burst: how many of them at once.
            timeout: seconds for one event.
            backoff: how long failed events wait; default: the backoff of the group.
            max_attempts: after so many the event goes to the dead letters of the group.
            transactional: the handler gets a connection too, and its transaction and the ack commit together.
            manual_ack: the handler finishes its events itself.
            process: run in another process.
            weight: the share of turns, with ``Worker(priority="weighted")``.
            create: make the group if it does not exist, with the other `options`.
            serializer: for its payloads.
            options: for a group that is made (``ordering="key"``, ``start="earliest"``).
        """

        def register(function: F) -> F:
            self.handlers.append(
                Handler(
                    function=function,
                    source=name,
                    group=group,
                    type=type,
                    concurrency=concurrency,
                    prefetch=max(200, 2 * concurrency) if prefetch is None else prefetch,
                    lease=lease,
                    rate=rate,
                    burst=burst,
                    timeout=timeout,
                    backoff=backoff,
                    max_attempts=max_attempts,
                    transactional=transactional,
                    manual_ack=manual_ack,
                    process=process,
                    weight=weight,
                    create=create,
                    serializer=serializer or self.serializer,
                    options=options,
                )
            )
            return function

        return register

    def cron(
        self,
        cron: str,
        *,
        queue: str | None = None,
        timezone: str = "UTC",
        name: str | None = None,
        missed: str = "once",
        timeout: float | None = None,
    ) -> Callable[[F], F]:
        """Call a function at certain times, once for each of them in the whole database.

        What it returns is sent to `queue`, together with the note that this slot is done: exactly once. The
        function may take the message of its slot, with the time in ``m.headers["slot"]``.

        Args:
            cron: five fields, as for ``postbus.schedule``.
            queue: where the result goes; default: nowhere. None as a result is not sent.
            timezone: in which `cron` is read.
            name: of the schedule; default: the function's.
            missed: what to do about slots at which no worker ran: ``once``, ``all`` or ``skip``.
            timeout: seconds for one call.
        """

        def register(function: F) -> F:
            made = Cron(
                function, cron, queue=queue, timezone=timezone, name=name, missed=missed, timeout=timeout
            )
            if any(made.name == other.name for other in self.crons):
                raise BadArgument(
                    f"two cron functions are called {made.name!r}", hint="Give one of them another name=."
                )
            self.crons.append(made)
            self.handlers.append(made.handler(cast("Worker", self)))
            return function

        return register

    def use(self, middleware: Middleware) -> Middleware:
        """Put a coroutine function around every handler: ``async def log(m, call_next): await call_next(m)``.

        The first one is the outermost. What it raises is the handler's failure.
        """
        call = middleware if inspect.isroutine(middleware) else getattr(middleware, "__call__", None)  # noqa: B004
        if not inspect.iscoroutinefunction(call):
            raise BadArgument(
                f"middleware {getattr(middleware, '__qualname__', middleware)!r} is not a coroutine function",
                hint="Write: async def name(m, call_next): ...",
            )
        self.middleware.append(middleware)
        return middleware
