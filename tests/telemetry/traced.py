"""An application with OpenTelemetry: sends, handles, fails once; prints its spans and metrics as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from postbus import AsyncBus, Message, Worker

exporter = InMemorySpanExporter()
reader = InMemoryMetricReader()


def set_up() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))


async def main(dsn: str) -> None:
    seen: list[dict[str, Any]] = []
    worker = Worker(dsn)

    @worker.queue("emails", create=True, backoff=None, transactional=False)
    async def handle(m: Message[Any]) -> None:
        seen.append({"headers": m.headers, "attempt": m.attempt})
        with trace.get_tracer("app").start_as_current_span("inside"):
            if len(seen) == 1:
                raise ValueError("once")

    async with AsyncBus(dsn) as bus:
        emails = await bus.queue("emails", create=True, backoff=0)
        with trace.get_tracer("app").start_as_current_span("request"):
            await emails.send({"n": 1}, headers={"mine": "yes"})
            await emails.send_batch([{"n": 2}, {"n": 3}])
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(30):
        while not complete(metered := measured()):  # noqa: ASYNC110 - polled, as a collector would
            await asyncio.sleep(0.05)
    worker.stop()
    await running
    spans = [
        {
            "name": s.name,
            "kind": s.kind.name,
            "id": f"{s.context.span_id:016x}",
            "parent": None if s.parent is None else f"{s.parent.span_id:016x}",
            "trace": f"{s.context.trace_id:032x}",
            "status": s.status.status_code.name,
            "attributes": dict(s.attributes or {}),
            "seconds": ((s.end_time or 0) - (s.start_time or 0)) / 1e9,
        }
        for s in exporter.get_finished_spans()
    ]
    json.dump({"spans": spans, "seen": seen, "metrics": metered}, sys.stdout, default=str)


def measured() -> dict[str, list[dict[str, Any]]]:
    found = reader.get_metrics_data()
    data = json.loads(found.to_json()) if found is not None else {"resource_metrics": []}
    return {
        metric["name"]: metric["data"]["data_points"]
        for resource in data["resource_metrics"]
        for scope in resource["scope_metrics"]
        for metric in scope["metrics"]
    }


def complete(metered: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether everything was told, and the database was asked."""
    acked = sum(p["value"] for p in metered.get("postbus.message.acked_total", ()))
    return acked >= 3 and "postbus.queue.depth" in metered


if __name__ == "__main__":
    set_up()
    asyncio.run(main(sys.argv[1]))
