"""How payloads become text or bytes, and back.

JSON is the default. A message that is anything else says so in its header ``content-type``, so that
consumers decode what they get rather than what they expect.

Example:
    >>> from postbus.serializers import JSON, MsgPack
    >>> JSON().dumps({"id": 1})
    '{"id":1}'
    >>> MsgPack().loads(MsgPack().dumps([1, 2]), None)
    [1, 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import msgspec

from postbus.errors import BadArgument, Undecodable

__all__ = ["JSON", "Bytes", "MsgPack", "Serializer", "Text"]


@runtime_checkable
class Serializer(Protocol):
    """Turns payloads into what the database keeps. `dumps` returns text or bytes; `loads` gets the same back.

    `model` is the type that the consumer asked for, or None. `loads` may raise whatever it likes on data
    that it cannot read: the message goes to the dead letters with that reason.
    """

    content_type: str

    def dumps(self, value: Any, /) -> str | bytes:
        """Encode a payload."""
        ...

    def loads(self, data: str | bytes, model: Any, /) -> Any:
        """Decode a payload."""
        ...


def _plain(value: Any) -> Any:
    """Of what msgspec does not know itself: pydantic models."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    raise TypeError(f"a {type(value).__qualname__} has no form in JSON or msgpack")


def _encoding(encode: Any, value: Any, name: str) -> bytes:
    try:
        return bytes(encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise BadArgument(
            f"the payload does not become {name}: {exc}",
            hint="Send dicts, lists, strings, numbers, dataclasses, msgspec structs or pydantic models, "
            "or give the queue or stream a serializer of your own.",
        ) from exc


def _is_pydantic(model: Any) -> bool:
    return hasattr(model, "__pydantic_validator__") or hasattr(model, "__get_pydantic_core_schema__")


def _into(model: Any, value: Any) -> Any:
    """Into what msgspec does not know itself."""
    if _is_pydantic(model):
        return _adapter(model).validate_python(value)
    raise NotImplementedError(f"nothing here makes a {getattr(model, '__qualname__', model)}")


@lru_cache(maxsize=512)
def _adapter(model: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(model)


@lru_cache(maxsize=512)
def _json_reader(model: Any) -> Any:
    if _is_pydantic(model):
        return _adapter(model).validate_json
    return msgspec.json.Decoder(Any if model is None else model, dec_hook=_into).decode


@lru_cache(maxsize=512)
def _msgpack_reader(model: Any) -> Any:
    if _is_pydantic(model):
        validate, decode = _adapter(model).validate_python, msgspec.msgpack.Decoder().decode
        return lambda data: validate(decode(data))
    return msgspec.msgpack.Decoder(Any if model is None else model, dec_hook=_into).decode


def _fits(model: Any, kind: type) -> None:
    if model not in (None, Any, object, kind):
        raise TypeError(f"it is {kind.__name__}, not {getattr(model, '__qualname__', model)}")


class JSON:
    """JSON as text.

    Decodes into dataclasses, msgspec structs, TypedDicts and pydantic models, and checks them.
    """

    content_type = "application/json"
    _encode = msgspec.json.Encoder(enc_hook=_plain).encode

    def dumps(self, value: Any, /) -> str:
        """Encode a payload."""
        return _encoding(self._encode, value, "JSON").decode()

    def loads(self, data: str | bytes, model: Any = None, /) -> Any:
        """Decode a payload into `model`, or into plain Python values."""
        return _json_reader(model)(data)


class MsgPack:
    """Msgpack: like JSON, with bytes and timestamps, and smaller."""

    content_type = "application/msgpack"
    _encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode

    def dumps(self, value: Any, /) -> bytes:
        """Encode a payload."""
        return _encoding(self._encode, value, "msgpack")

    def loads(self, data: str | bytes, model: Any = None, /) -> Any:
        """Decode a payload into `model`, or into plain Python values. Text, as sent by SQL, is JSON."""
        return (_json_reader if isinstance(data, str) else _msgpack_reader)(model)(data)


class Text:
    """A string as it is."""

    content_type = "text/plain"

    def dumps(self, value: Any, /) -> str:
        """Return the string."""
        if not isinstance(value, str):
            raise BadArgument(f"a queue or stream of text takes strings, not {type(value).__qualname__}")
        if "\0" in value:
            raise BadArgument("text in PostgreSQL has no NUL characters", hint="Send it with Bytes.")
        return value

    def loads(self, data: str | bytes, model: Any = None, /) -> str:
        """Return the string."""
        _fits(model, str)
        return data if isinstance(data, str) else data.decode()


class Bytes:
    """Bytes as they are."""

    content_type = "application/octet-stream"

    def dumps(self, value: Any, /) -> bytes:
        """Return the bytes."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise BadArgument(f"a queue or stream of bytes takes bytes, not {type(value).__qualname__}")
        return bytes(value)

    def loads(self, data: str | bytes, model: Any = None, /) -> bytes:
        """Return the bytes."""
        _fits(model, bytes)
        return data.encode() if isinstance(data, str) else data


_KNOWN: dict[str, Serializer] = {s.content_type: s for s in (JSON(), MsgPack(), Text(), Bytes())}


class Codec:
    """The serializer and the model of one queue or stream: payloads to columns, and back.

    Raises:
        BadArgument: nothing can be decoded into the model. Better now than for each message.
    """

    __slots__ = ("_by_type", "_model", "_named", "serializer")

    def __init__(self, serializer: Serializer | None = None, model: Any = None) -> None:
        self.serializer = serializer or _KNOWN[JSON.content_type]
        self._model = model
        # JSON goes without saying: messages that were sent by SQL have no header.
        self._named = self.serializer.content_type != JSON.content_type
        self._by_type = {**_KNOWN, self.serializer.content_type: self.serializer}
        if model is not None and isinstance(self.serializer, JSON | MsgPack):
            try:
                (_json_reader if isinstance(self.serializer, JSON) else _msgpack_reader)(model)
            except Exception as exc:
                raise BadArgument(f"payloads cannot be decoded into {model!r}: {exc}") from exc

    def encode(
        self, payload: Any, headers: dict[str, Any] | None
    ) -> tuple[str | bytes, dict[str, Any] | None]:
        """The payload as the database takes it, and the headers with what it is."""
        return self.serializer.dumps(payload), self.headers(headers)

    def encode_all(self, payloads: Sequence[Any]) -> list[str] | list[bytes]:
        """Payloads as the database takes them.

        Raises:
            BadArgument: they do not become text all, or bytes all.
        """
        if type(self.serializer) is JSON:
            # Without a call of ours for each: that would be half of what sending a batch costs here.
            encode = JSON._encode
            try:
                return [encode(p).decode() for p in payloads]
            except (TypeError, ValueError, OverflowError, RecursionError):
                pass  # one of them; below it is told which
        data: list[Any] = [self.serializer.dumps(p) for p in payloads]
        texts = isinstance(data[0], str)
        if any(isinstance(d, str) is not texts for d in data):
            raise BadArgument("payloads of text and of bytes in a batch", hint="Send them in two batches.")
        return data

    def headers(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Headers with what the payload is."""
        if not self._named:
            return given
        return {"content-type": self.serializer.content_type, **(given or {})}

    def decode(self, text: str | None, blob: bytes | None, headers: dict[str, Any] | None) -> Any:
        """The payload of a message.

        Raises:
            Undecodable: with the reason.
        """
        named = headers.get("content-type") if isinstance(headers, dict) else None
        if named is not None:
            serializer = self._reader(named)
        elif text is None and not self._named and self._model in (None, bytes):
            # Bytes without a name are bytes, unless something else is expected.
            serializer = _KNOWN[Bytes.content_type]
        else:
            serializer = self.serializer
        data = blob if text is None else text
        if data is None:
            raise Undecodable("the message has no payload")
        try:
            return serializer.loads(data, self._model)
        except Exception as exc:
            raise Undecodable(f"the payload is not readable as {serializer.content_type}: {exc}") from exc

    def look(self, text: str | None, blob: bytes | None, headers: dict[str, Any] | None) -> Any:
        """The payload of a message for somebody who only looks: as it is, if it cannot be decoded."""
        try:
            return self.decode(text, blob, headers)
        except Undecodable:
            return blob if text is None else text

    def _reader(self, named: object) -> Serializer:
        kind = named.partition(";")[0].strip().lower() if isinstance(named, str) else None
        found = self._by_type.get(str(named)) or self._by_type.get(str(kind))
        if found is None and kind is not None and kind.endswith("+json"):
            found = self._by_type[JSON.content_type]
        if found is None:
            raise Undecodable(f"nothing here reads the content type {named!r}")
        return found
