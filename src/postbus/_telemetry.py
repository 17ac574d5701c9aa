"""Traces and metrics by OpenTelemetry, where the application has set it up; else nothing.

The context travels in the headers of a message (``traceparent``, ``tracestate``). A message makes three
spans: the producer's, its wait in the queue, and the consumer's. Metrics of the database (depth, age, lag)
are read by the one worker that does the upkeep; those of the process (sent, acked, latency) are counted
where they happen.

Without the package, or before a provider is set, every function here returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from postbus._version import __version__

if TYPE_CHECKING:
    from postbus.client._message import Message

try:
    from opentelemetry import metrics as _metrics
    from opentelemetry import propagate as _propagate
    from opentelemetry import trace as _trace
except ImportError:
    _trace = _metrics = _propagate = None  # type: ignore[assignment]


def tracing() -> bool:
    """Whether the application has set a tracer provider."""
    return _trace is not None and not isinstance(_trace.get_tracer_provider(), _trace.ProxyTracerProvider)


def metering() -> bool:
    """Whether the application has set a meter provider."""
    if _metrics is None:
        return False
    # The stand-in until one is set has a private class.
    return not type(_metrics.get_meter_provider()).__name__.startswith("_Proxy")


class Sending:
    """Around a send or publish: gives the headers with the context of its span."""

    __slots__ = ("_count", "_headers", "_manager", "_source", "_verb")

    def __init__(self, verb: str, source: str, headers: Any, count: int = 1) -> None:
        self._verb = verb
        self._source = source
        self._headers = headers
        self._count = count
        self._manager: Any = None

    def __enter__(self) -> Any:
        if _trace is None or not tracing():
            return self._headers
        self._manager = _trace.get_tracer("postbus", __version__).start_as_current_span(
            f"{self._verb} {self._source}",
            kind=_trace.SpanKind.PRODUCER,
            attributes={**_where(self._source, self._verb), "messaging.batch.message_count": self._count},
        )
        self._manager.__enter__()
        carrier: dict[str, str] = {}
        _propagate.inject(carrier)
        if self._headers is None or isinstance(self._headers, dict):
            return {**carrier, **(self._headers or {})} or None
        return [{**carrier, **(h or {})} for h in self._headers]

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is not None:
            self._manager.__exit__(kind, exc, trace)
        if exc is None:
            count("sent_total", self._count, self._source)


@contextmanager
def handling(m: Message[Any]) -> Iterator[None]:
    """Around a handler: the span of the wait, then that of the consumer, both children of the producer's."""
    if _trace is None or not tracing():
        yield
        return
    parent = _propagate.extract({k: v for k, v in m.headers.items() if isinstance(v, str)})
    tracer = _trace.get_tracer("postbus", __version__)
    attributes = {
        **_where(m.source, "process"),
        "messaging.message.id": str(m.id),
        "postbus.message.type": m.type,
        "postbus.message.attempt": m.attempt,
    }
    if m.group is not None:
        attributes["messaging.consumer.group.name"] = m.group
    if m.created_at is not None:
        began = min(int(m.created_at.timestamp() * 1e9), time.time_ns())
        wait = tracer.start_span(
            f"wait {m.source}",
            context=parent,
            start_time=began,
            attributes={**attributes, "messaging.operation.name": "wait"},
        )
        wait.end(time.time_ns())
    with tracer.start_as_current_span(
        f"process {m.source}", context=parent, kind=_trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield


def _where(source: str, operation: str) -> dict[str, Any]:
    return {
        "messaging.system": "postbus",
        "messaging.destination.name": source,
        "messaging.operation.name": operation,
    }


_COUNTERS = {
    "sent_total": "Messages sent or published by this process",
    "acked_total": "Messages acked by this process",
    "nacked_total": "Messages given back or given up by this process",
}


class _Instruments:
    """Made once there is a provider."""

    def __init__(self) -> None:
        meter = _metrics.get_meter("postbus", __version__)
        self.counters = {
            name: meter.create_counter(f"postbus.message.{name}", unit="{message}", description=what)
            for name, what in _COUNTERS.items()
        }
        self.latency = meter.create_histogram(
            "postbus.processing_latency_seconds", unit="s", description="Time in the handler"
        )
        self.batch = meter.create_histogram(
            "postbus.batch.size", unit="{message}", description="Messages taken in one call"
        )


_instruments: dict[int, _Instruments] = {}


def _tools() -> _Instruments | None:
    if not metering():
        return None
    provider = id(_metrics.get_meter_provider())
    found = _instruments.get(provider)
    if found is None:
        found = _instruments[provider] = _Instruments()
    return found


def count(what: str, number: int, source: str) -> None:
    """Add to one of the counters sent_total, acked_total, nacked_total."""
    if _metrics is not None and (tools := _tools()) is not None:
        tools.counters[what].add(number, {"source": source})


def took(seconds: float, source: str, ok: bool) -> None:
    """A handler took so long."""
    if _metrics is not None and (tools := _tools()) is not None:
        tools.latency.record(seconds, {"source": source, "outcome": "ok" if ok else "failed"})


def batch(size: int, source: str) -> None:
    """So many messages came in one call."""
    if _metrics is not None and (tools := _tools()) is not None:
        tools.batch.record(size, {"source": source})


class Gauges:
    """What ``postbus.metrics()`` says of the database, for whoever collects metrics from this process."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, dict[str, str]]]] = {}
        self._made: set[str] = set()

    def show(self, rows: list[tuple[Any, ...]]) -> None:
        """Take a new reading: name, type, value, labels."""
        if not metering():
            return
        self._rows = {}
        for name, _, value, labels in rows:
            tags = {k: str(v) for k, v in (labels or {}).items()}
            self._rows.setdefault(name, []).append((float(value or 0), tags))
        meter = _metrics.get_meter("postbus", __version__)
        for name, kind, _, _ in rows:
            # What this process counts itself has the same name.
            if name not in self._made and name.removeprefix("postbus.message.") not in _COUNTERS:
                self._made.add(name)
                make = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
                make(name, callbacks=[self._reader(name)])

    def clear(self) -> None:
        """Another process does it now."""
        self._rows = {}

    def _reader(self, name: str) -> Any:
        def read(_options: Any) -> Iterator[Any]:
            for value, labels in self._rows.get(name, ()):
                yield _metrics.Observation(value, labels)

        return read
