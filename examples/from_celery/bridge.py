"""For the time of moving: functions keep `.delay()` and `.apply_async()`, but Postbus carries them.

Callers stay as they are while tasks move over one by one. `conn=` is new: the task is then part of the
caller's transaction.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypeVar

from postbus import Bus, Message, Worker

P = ParamSpec("P")
R = TypeVar("R")


class Task(Generic[P, R]):
    def __init__(self, tasks: "Tasks", function: Callable[P, R], name: str) -> None:
        self._tasks, self._function, self.name = tasks, function, name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> int:
        return self.apply_async(args, kwargs)

    def apply_async(
        self,
        args: Any = (),
        kwargs: Any = None,
        *,
        countdown: float | None = None,
        eta: datetime | None = None,
        conn: object | None = None,
    ) -> int:
        call = {"args": args, "kwargs": kwargs or {}}
        queue = self._tasks.bus.queue(self._tasks.queue)
        return queue.send(call, type=self.name, delay=countdown, deliver_at=eta, conn=conn)


class Tasks:
    """One queue for all tasks: the type of a message names its function."""

    def __init__(self, worker: Worker, bus: Bus, queue: str = "tasks", **options: Any) -> None:
        self.bus, self.queue = bus, queue
        self._known: dict[str, Task[..., Any]] = {}
        worker.queue(queue, create=True, **options)(self._run)

    def task(self, function: Callable[P, R]) -> Task[P, R]:
        name = f"{function.__module__}.{function.__qualname__}"
        made = Task(self, function, name)
        self._known[name] = made
        return made

    def _run(self, m: Message[Any]) -> None:
        # A worker that does not know the task raises: it comes again, perhaps to one that does.
        self._known[m.type](*m.payload["args"], **m.payload["kwargs"])
