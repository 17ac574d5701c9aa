"""Rows on their way into the sink: batches of Arrow cut into chunks that `stage` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postbus.errors import BadArgument
from postbus.spark._arrays import pg_array

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_EVENTS, CHUNK_BYTES = 5_000, 8 * 2**20


@dataclass
class Chunk:
    """Arrays for one call of `stage`: payloads or blobs, and the rest or nothing."""

    events: int
    payloads: Any
    blobs: Any
    types: Any
    keys: Any
    headers: Any


def chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[Chunk]:
    """Rows in pieces of a fair size, cut where payloads and blobs change over."""
    for batch in batches:
        texts, blobs = _bodies(batch)
        step = max(1, min(CHUNK_EVENTS, CHUNK_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for start, end, is_text in _runs(texts):
            for first in range(start, end, step):
                n = min(step, end - first)
                yield _chunk(batch.slice(first, n), (texts if is_text else blobs).slice(first, n), is_text)


def _bodies(batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """The texts and the bytes of the rows; every row has one of the two."""
    import pyarrow as pa
    import pyarrow.compute as pc

    none = pa.nulls(batch.num_rows, pa.binary())
    names = batch.schema.names
    payload = batch["payload"] if "payload" in names else none
    blob = batch["blob"] if "blob" in names else none
    is_text = pa.types.is_string(payload.type) or pa.types.is_large_string(payload.type)
    given = pc.add(payload.is_valid().cast(pa.int8()), blob.is_valid().cast(pa.int8()))
    if not pc.all(pc.equal(given, 1)).as_py() and batch.num_rows:
        neither = pc.any(pc.equal(given, 0)).as_py()
        raise BadArgument(
            "a row has no payload" if neither else "a row has both payload and blob",
            hint="Every event has one of the two: filter such rows out.",
        )
    return (payload, blob) if is_text else (none, pc.coalesce(payload, blob))


def _runs(texts: pa.Array) -> Iterator[tuple[int, int, bool]]:
    """Where texts follow each other, and where bytes do."""
    import pyarrow.compute as pc

    if texts.null_count in (0, len(texts)):
        if len(texts):
            yield 0, len(texts), texts.null_count == 0
        return
    runs = pc.run_end_encode(texts.is_valid())
    start = 0
    for end, is_text in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
        yield start, end, is_text
        start = end


def _chunk(batch: pa.RecordBatch, bodies: pa.Array, is_text: bool) -> Chunk:
    import pyarrow.compute as pc

    found = {n: batch[n] for n in ("type", "key", "headers") if n in batch.schema.names}
    kept = {n: c for n, c in found.items() if c.null_count < len(c)}
    if "type" in kept:
        types = kept["type"]
        kept["type"] = pc.if_else(pc.equal(pc.fill_null(types, ""), ""), "default", types)
    if "headers" in kept:
        kept["headers"] = _documents(kept["headers"])
    return Chunk(
        events=len(bodies),
        payloads=pg_array(bodies, "text") if is_text else None,
        blobs=None if is_text else pg_array(bodies, "bytea"),
        types=pg_array(kept["type"], "text") if "type" in kept else None,
        keys=pg_array(kept["key"], "text") if "key" in kept else None,
        headers=pg_array(kept["headers"], "jsonb") if "headers" in kept else None,
    )


def _documents(headers: pa.Array) -> pa.Array:
    """Headers as JSON texts: they are, or they are maps."""
    import pyarrow as pa

    if not pa.types.is_map(headers.type):
        return headers
    values = headers.to_pylist()
    return pa.array([None if v is None else json.dumps(dict(v)) for v in values], pa.string())
