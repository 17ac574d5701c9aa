"""Payloads to columns and back, without a database."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, TypedDict

import msgspec
import pytest
from pydantic import BaseModel, Field

from postbus import BadArgument, Undecodable
from postbus.serializers import JSON, Bytes, Codec, MsgPack, Serializer, Text


@dataclass
class Point:
    x: int
    y: int = 0


class Email(msgspec.Struct):
    to: str
    copies: list[str] = []


class Row(TypedDict):
    id: int


class Order(BaseModel):
    number: int = Field(gt=0)
    at: datetime | None = None


@dataclass
class Mixed:
    order: Order
    points: list[Point]


def there_and_back(serializer: Serializer, value: Any, model: Any = None) -> Any:
    codec = Codec(serializer, model)
    data, headers = codec.encode(value, None)
    if isinstance(data, str):
        return codec.decode(data, None, headers)
    return codec.decode(None, data, headers)


VALUES = [
    (Point(1, 2), Point, {"x": 1, "y": 2}),
    (Email("someone@example.com"), Email, {"to": "someone@example.com", "copies": []}),
    ({"id": 1}, Row, {"id": 1}),
    (Order(number=1), Order, {"number": 1, "at": None}),
    ([Order(number=1)], list[Order], [{"number": 1, "at": None}]),
    (
        Mixed(Order(number=2), [Point(1)]),
        Mixed,
        {"order": {"number": 2, "at": None}, "points": [{"x": 1, "y": 0}]},
    ),
    ([1, 2], list[int], [1, 2]),
    ("a", Literal["a", "b"], "a"),
]


@pytest.mark.parametrize("serializer", [JSON(), MsgPack()], ids=["json", "msgpack"])
@pytest.mark.parametrize(("value", "model", "plain"), VALUES, ids=lambda v: getattr(v, "__name__", ""))
def test_models(serializer: Serializer, value: Any, model: Any, plain: Any) -> None:
    assert there_and_back(serializer, value, model) == value
    assert there_and_back(serializer, value) == plain


def test_pydantic_checks_and_converts() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert there_and_back(JSON(), {"number": "7", "at": at.isoformat()}, Order) == Order(number=7, at=at)
    with pytest.raises(Undecodable, match="greater than 0"):
        there_and_back(JSON(), {"number": 0}, Order)
    with pytest.raises(Undecodable, match="greater than 0"):
        there_and_back(MsgPack(), [{"number": 0}], list[Order])


@pytest.mark.parametrize("serializer", [JSON(), MsgPack()], ids=["json", "msgpack"])
def test_what_does_not_fit_the_model(serializer: Serializer) -> None:
    with pytest.raises(Undecodable, match=r"application/\w+: Expected `int`, got `str` - at `\$.x`"):
        there_and_back(serializer, {"x": "one"}, Point)
    with pytest.raises(Undecodable, match="missing required field `to`"):
        there_and_back(serializer, {}, Email)


def test_json_of_many_types() -> None:
    value = {
        "at": datetime(2026, 1, 31, tzinfo=UTC),
        "total": Decimal("12.50"),
        "id": uuid.UUID(int=1),
        "tags": {"a"},
    }
    assert there_and_back(JSON(), value) == {
        "at": "2026-01-31T00:00:00Z",
        "total": "12.50",
        "id": "00000000-0000-0000-0000-000000000001",
        "tags": ["a"],
    }


def test_json_is_text_and_needs_no_header() -> None:
    assert Codec().encode({"a": "ü\0"}, None) == ('{"a":"ü\\u0000"}', None)
    assert Codec().encode(1, {"h": 1}) == ("1", {"h": 1})


def test_others_say_what_they_are() -> None:
    data, headers = Codec(MsgPack()).encode([1], {"h": 1})
    assert isinstance(data, bytes)
    assert headers == {"content-type": "application/msgpack", "h": 1}
    assert Codec(Text()).encode("a", None) == ("a", {"content-type": "text/plain"})
    assert Codec(Bytes()).encode(b"\0", None) == (b"\0", {"content-type": "application/octet-stream"})


def test_consumers_read_what_they_get() -> None:
    """A JSON consumer understands a msgpack producer, and the other way round."""
    data, headers = Codec(MsgPack()).encode({"x": 1}, None)
    assert isinstance(data, bytes)
    assert Codec(JSON(), Point).decode(None, data, headers) == Point(1)
    assert Codec(MsgPack(), Point).decode('{"x": 1}', None, {"content-type": "application/json"}) == Point(1)
    assert Codec().decode("plain", None, {"content-type": "text/plain"}) == "plain"


@pytest.mark.parametrize(
    "named",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.shop+json"],
)
def test_spellings_of_the_content_type(named: str) -> None:
    assert Codec(Text()).decode("[1]", None, {"content-type": named}) == [1]


@pytest.mark.parametrize("named", ["application/xml", "", 7, [], {}, "x" * 500])
def test_unknown_content_type(named: Any) -> None:
    with pytest.raises(Undecodable, match="nothing here reads the content type"):
        Codec().decode("1", None, {"content-type": named})


def test_headers_that_are_no_object() -> None:
    odd: Any = ["content-type"]
    assert Codec().decode("1", None, odd) == 1


def test_sent_by_sql() -> None:
    """Without a header text is JSON, and bytes are bytes."""
    assert Codec().decode('{"a": 1}', None, None) == {"a": 1}
    assert Codec().decode(None, b"\x00\xff", None) == b"\x00\xff"
    assert Codec(None, bytes).decode(None, b"\x00\xff", None) == b"\x00\xff"
    assert Codec(None, Point).decode(None, b'{"x": 1}', None) == Point(1)
    assert Codec(MsgPack(), Point).decode('{"x": 1}', None, None) == Point(1)
    assert Codec(MsgPack()).decode(None, b"\x91\x01", None) == [1]
    assert Codec(Text()).decode("not json", None, None) == "not json"
    assert Codec(Bytes()).decode("text", None, None) == b"text"
    with pytest.raises(Undecodable, match="JSON is malformed"):
        Codec().decode("not json", None, None)
    with pytest.raises(Undecodable, match="no payload"):
        Codec().decode(None, None, None)


def test_a_model_that_text_cannot_be() -> None:
    with pytest.raises(Undecodable, match="it is str, not Point"):
        Codec(None, Point).decode("a", None, {"content-type": "text/plain"})
    with pytest.raises(Undecodable, match="it is bytes, not Point"):
        Codec(None, Point).decode(None, b"a", {"content-type": "application/octet-stream"})
    assert Codec(None, str).decode("a", None, {"content-type": "text/plain"}) == "a"


def test_looking_never_fails() -> None:
    assert Codec(None, Point).look('{"x": 1}', None, None) == Point(1)
    assert Codec(None, Point).look("not json", None, None) == "not json"
    assert Codec().look(None, b"\0", {"content-type": "application/xml"}) == b"\0"


@pytest.mark.parametrize("serializer", [JSON(), MsgPack()], ids=["json", "msgpack"])
def test_what_cannot_be_encoded(serializer: Serializer) -> None:
    for value in (object(), {"a": {1: object()}}, lambda: 1):
        with pytest.raises(BadArgument, match=r"does not become(.|\n)*serializer of your own"):
            serializer.dumps(value)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadArgument):
        serializer.dumps(loop)


def test_text_and_bytes_are_strict() -> None:
    with pytest.raises(BadArgument, match="takes strings, not int"):
        Text().dumps(1)
    with pytest.raises(BadArgument, match=r"no NUL(.|\n)*Bytes"):
        Text().dumps("a\0b")
    with pytest.raises(BadArgument, match="takes bytes, not str"):
        Bytes().dumps("a")
    assert Bytes().dumps(bytearray(b"a")) == Bytes().dumps(memoryview(b"a")) == b"a"


def test_a_model_that_nothing_can_be_decoded_into() -> None:
    """One error for the programmer, rather than one dead letter for each message."""
    with pytest.raises(BadArgument, match="cannot be decoded into"):
        Codec(None, int | list[Point] | list[Email])


class Words:
    """A serializer of somebody's own."""

    content_type = "text/x-words"

    def dumps(self, value: Any, /) -> str:
        return " ".join(value)

    def loads(self, data: str | bytes, model: Any, /) -> Any:
        assert isinstance(data, str)
        if "!" in data:
            raise RuntimeError("no shouting")
        return data.split()


def test_own_serializer() -> None:
    assert isinstance(Words(), Serializer)
    assert there_and_back(Words(), ["a", "b"]) == ["a", "b"]
    with pytest.raises(Undecodable, match="text/x-words: no shouting"):
        there_and_back(Words(), ["a!"])
    with pytest.raises(Undecodable, match="nothing here reads the content type 'text/x-words'"):
        Codec().decode("a", None, Codec(Words()).encode(["a"], None)[1])
