"""Rows go in once and come out as they were, through this library and through others."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from postbus.errors import BadArgument, NotFound
from postbus.lake import FileWriter, _files
from tests.lake.conftest import Lake, rows

NOW = datetime(2026, 5, 1, 23, 59, 59, 123456, tzinfo=UTC)
STREAMS = ["orders", "a/b=c", "50% é [x]{y}*?", "a%2Fb", "'\"\\:#^", " ", "日本", "", None]


def events() -> pa.Table:
    n = len(STREAMS)
    return pa.table(
        {
            "stream": pa.array(STREAMS, pa.string()),
            "id": pa.array(range(n), pa.int64()),
            "lane": pa.array([0, 1, None] * 3, pa.int32()),
            "at": pa.array([NOW] * n, pa.timestamp("us", "UTC")),
            "payload": pa.array(["x" * 200, None, ""] * 3, pa.string()),
            "blob": pa.array([b"\0\xff", None, b""] * 3, pa.binary()),
            "day": pa.array([date(2026, 5, 1), date(1969, 12, 31), None] * 3, pa.date32()),
            "price": pa.array([Decimal("1.20"), Decimal("-0.01"), None] * 3, pa.decimal128(10, 2)),
            "ok": pa.array([True, False, None] * 3),
            "share": pa.array([float("inf"), 1e300, None] * 3, pa.float64()),
            "tags": pa.array([["a", None], [], None] * 3, pa.list_(pa.string())),
        }
    )


def as_stored(table: pa.Table) -> list[object]:
    """An empty text in a partition column is null."""
    at = table.schema.get_field_index("stream")
    cleaned = pc.if_else(pc.equal(table["stream"], ""), None, table["stream"])
    return rows(table.set_column(at, "stream", cleaned))


def test_rows_come_back(lake: Lake) -> None:
    table = lake.table(events().schema, "stream", "day")
    assert table.append(table.write(events()), events().schema, "q", 0) is True
    expected = as_stored(events())
    assert rows(table.read()) == expected
    other = lake.elsewhere()
    assert rows(other.select(table.schema().names)) == expected, "the format's own library agrees"
    assert other.schema.field("at").type == pa.timestamp("us", "UTC")
    assert lake.open().schema() == table.schema()
    assert sum(f.rows for f in table.files()) == len(STREAMS)
    assert len({f.path.rsplit("/", 1)[0] for f in table.files()}) == len(table.files())


def test_partitions_are_pruned(lake: Lake) -> None:
    table = lake.table(events().schema, "stream", "day")
    table.append(table.write(events()), events().schema)
    for number, stream in enumerate(STREAMS[:-2]):
        found = table.read(["id"], where=pc.field("stream") == stream)
        assert rows(found) == [(number,)], stream
        # What lies in other folders is not even looked at.
        fragments = list(table.dataset().get_fragments(filter=pc.field("stream") == stream))
        assert len(fragments) == 1
    assert rows(table.read(["id"], where=pc.field("stream").is_null())) == [(7,), (8,)]


def test_a_batch_is_added_once(lake: Lake) -> None:
    schema = pa.schema({"n": pa.int64()})
    table = lake.table(schema)
    assert table.done("q") is None
    assert table.append(table.write(pa.table({"n": [1]})), schema, "q", 0) is True
    version = table.version()
    # Written anew by another attempt, as Spark does, and by another process.
    again = lake.open()
    assert again.append(again.write(pa.table({"n": [1]})), schema, "q", 0) is False
    assert again.append(again.write(pa.table({"n": [1]})), schema, "q", -1) is False
    assert again.version() == version
    assert again.append(again.write(pa.table({"n": [2]})), schema, "q", 7) is True
    assert again.append(again.write(pa.table({"n": [3]})), schema, "other", 0) is True
    assert (again.done("q"), again.done("other"), again.done("nobody")) == (7, 0, None)
    assert rows(lake.elsewhere(), "n") == rows(again.read(), "n") == [1, 2, 3]


def test_the_record_outlives_checkpoints_and_long_logs(lake: Lake) -> None:
    schema = pa.schema({"n": pa.int64()})
    table = lake.table(schema)
    for n in range(12):
        table.append(table.write(pa.table({"n": [n]})), schema, "q", n)
    if lake.format == "delta":
        import deltalake

        deltalake.DeltaTable(str(lake.folder / "events")).create_checkpoint()
    again = lake.open()
    assert again.done("q") == 11
    assert again.append(again.write(pa.table({"n": [99]})), schema, "q", 11) is False
    assert rows(again.read(), "n") == list(range(12))


def test_nothing_is_seen_before_the_commit(lake: Lake) -> None:
    schema = pa.schema({"n": pa.int64()})
    table = lake.table(schema)
    table.append(table.write(pa.table({"n": [1]})), schema, "q", 0)
    table.write(pa.table({"n": [2, 3]}))  # and the process dies
    assert rows(table.read(), "n") == rows(lake.elsewhere(), "n") == [1]
    assert len(list((lake.folder / "events").rglob("*.parquet"))) == 2


def test_an_empty_batch(lake: Lake) -> None:
    schema = pa.schema({"n": pa.int64()})
    table = lake.table(schema)
    version = table.version()
    files = table.write(pa.table({"n": pa.array([], pa.int64())}))
    assert files == []
    assert table.append(files, schema, "q", 0) is True
    assert table.version() == version
    assert table.read().num_rows == lake.elsewhere().num_rows == 0
    assert table.read().schema == schema


def test_columns_are_added(lake: Lake) -> None:
    old = pa.table({"n": pa.array([1], pa.int32())})
    table = lake.table(old.schema)
    table.append(table.write(old), old.schema, "q", 0)
    new = pa.table({"more": ["x"], "n": pa.array([2], pa.int32()), "at": pa.array([NOW])})
    table.append(table.write(new), new.schema, "q", 1)
    table.append(table.write(old), old.schema, "q", 2)
    expected = [(1, None, None), (1, None, None), (2, "x", NOW)]
    assert rows(table.read(["n", "more", "at"])) == expected
    assert rows(lake.elsewhere(), "n", "more", "at") == expected
    assert table.schema().names == ["n", "more", "at"]


def test_a_narrow_type_fits_and_another_does_not(lake: Lake) -> None:
    table = lake.table(pa.schema({"n": pa.int64(), "x": pa.float64()}))
    narrow = pa.table({"n": pa.array([1], pa.int16()), "x": pa.array([2], pa.int32())})
    table.append(table.write(narrow), narrow.schema)
    assert rows(table.read()) == rows(lake.elsewhere()) == [(1, 2.0)]
    for wrong in (pa.array(["1"]), pa.array([1.0]), pa.array([NOW])):
        with pytest.raises(BadArgument, match="column 'n' of lake table events is int64"):
            table.append([], pa.table({"n": wrong}).schema)
    with pytest.raises(BadArgument, match="has a column 'n', and the rows have 'N'"):
        table.append([], pa.schema({"N": pa.int64()}))


def test_old_versions(lake: Lake) -> None:
    schema = pa.schema({"n": pa.int64()})
    table = lake.table(schema)
    table.append(table.write(pa.table({"n": [1]})), schema)
    first = table.version()
    assert first is not None
    grown = pa.table({"n": [2], "more": ["x"]})
    table.append(table.write(grown), grown.schema)
    old = lake.open(version=first)
    assert rows(old.read()) == [(1,)]
    assert old.version() == first
    assert old.schema() == schema
    assert rows(lake.open(version=table.version()).read(), "n") == [1, 2]
    with pytest.raises(BadArgument, match="only read"):
        old.append(old.write(grown), grown.schema)
    with pytest.raises(NotFound, match="no version 4711"):
        lake.open(version=4711).schema()


def test_files_of_a_fair_size(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "GROUP_BYTES", 2**16)
    monkeypatch.setattr(_files, "BUFFER_BYTES", 2**18)
    monkeypatch.setattr(_files, "OPEN_FILES", 2)
    schema = pa.schema({"part": pa.int64(), "noise": pa.binary()})
    table = lake.table(schema, "part")
    count = 0
    with FileWriter(table.layout, file_bytes=2**18) as writer:
        for n in range(60):
            noise = pa.array([os.urandom(400) for _ in range(100)], pa.binary())
            parts = pa.array([(n + i) % 4 for i in range(100)], pa.int64())
            writer.write(pa.RecordBatch.from_arrays([parts, noise], schema=schema))
            count += 100
            assert sum(writer._bytes.values()) <= 2**18, "memory is bounded"
            assert len(writer._open) <= 2, "open files are bounded"
    assert max(f.size for f in writer.files) < 2**18 + 2**17
    assert len(writer.files) > 8
    paths = [Path(table.place.path(f.path)) for f in writer.files]
    assert any(pq.read_metadata(p).num_row_groups > 1 for p in paths)
    table.append(writer.files, schema)
    assert table.read(["noise"]).num_rows == count
    assert [f.size for f in writer.files] == [p.stat().st_size for p in paths]
