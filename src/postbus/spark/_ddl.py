"""Schemas as text, without a JVM: where a data source is made there is none to ask.

Example:
    >>> parse_schema("id bigint, tags array<string>").simpleString()
    'struct<id:bigint,tags:array<string>>'
"""

from __future__ import annotations

import json
import re

from pyspark.sql import types as t

from postbus.errors import BadArgument

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*|\d+)|`(?P<quoted>(?:[^`]|``)+)`|(?P<sign>[<>(),:]))")
_SIMPLE: dict[str, t.DataType] = {
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "boolean": t.BooleanType(),
    "byte": t.ByteType(),
    "tinyint": t.ByteType(),
    "short": t.ShortType(),
    "smallint": t.ShortType(),
    "int": t.IntegerType(),
    "integer": t.IntegerType(),
    "long": t.LongType(),
    "bigint": t.LongType(),
    "float": t.FloatType(),
    "real": t.FloatType(),
    "double": t.DoubleType(),
    "date": t.DateType(),
    "timestamp": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
}


def parse_schema(text: str, option: str = "payloadSchema") -> t.StructType:
    """A schema given as DDL (``a int, b struct<c: string>``) or as Spark's JSON."""
    if text.lstrip().startswith("{"):
        try:
            return t.StructType.fromJson(json.loads(text))
        except Exception as exc:
            raise _bad(option, text, f"it is not the JSON of a struct: {exc}") from exc
    parser = _Parser(text, option)
    schema = t.StructType(parser.fields())
    if parser.peek() is not None:
        raise parser.bad(f"unexpected {parser.peek()!r}")
    return schema


def _bad(option: str, text: str, why: str) -> BadArgument:
    return BadArgument(
        f"option {option} does not parse: {why}",
        detail=f"It says: {text}",
        hint="Write it as DDL, such as 'id bigint, amount decimal(10,2), tags array<string>', or as JSON.",
    )


class _Parser:
    def __init__(self, text: str, option: str) -> None:
        self.text = text
        self.option = option
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise self.bad(f"unexpected {text[at:].strip()[0]!r}")
            kind = found.lastgroup or ""
            self.tokens.append((kind, found[kind].replace("``", "`")))
            at = found.end()

    def bad(self, why: str) -> BadArgument:
        return _bad(self.option, self.text, why)

    def peek(self) -> str | None:
        return self.tokens[0][1] if self.tokens else None

    def take(self, what: str) -> str:
        if not self.tokens:
            raise self.bad(f"{what} is missing at the end")
        return self.tokens.pop(0)[1]

    def sign(self, sign: str) -> None:
        if not self.tokens or self.tokens[0] != ("sign", sign):
            raise self.bad(f"{sign!r} expected, not {self.peek() or 'the end'!r}")
        self.tokens.pop(0)

    def skip(self, sign: str) -> bool:
        if self.tokens and self.tokens[0] == ("sign", sign):
            self.tokens.pop(0)
            return True
        return False

    def fields(self) -> list[t.StructField]:
        found: list[t.StructField] = []
        while True:
            if not self.tokens or self.tokens[0][0] == "sign":
                raise self.bad(f"a column name expected, not {self.peek() or 'the end'!r}")
            name = self.take("a column name")
            if name.lower() in {f.name.lower() for f in found}:
                raise self.bad(f"column {name!r} is there twice")
            self.skip(":")
            found.append(t.StructField(name, self.type()))
            if not self.skip(","):
                return found

    def type(self) -> t.DataType:
        name = self.take("a type").lower()
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        if name == "array":
            self.sign("<")
            inner = self.type()
            self.sign(">")
            return t.ArrayType(inner)
        if name == "map":
            self.sign("<")
            key = self.type()
            self.sign(",")
            value = self.type()
            self.sign(">")
            return t.MapType(key, value)
        if name == "struct":
            self.sign("<")
            fields = self.fields()
            self.sign(">")
            return t.StructType(fields)
        if name not in _SIMPLE:
            raise self.bad(f"{name!r} is not a type")
        return _SIMPLE[name]

    def _decimal(self) -> t.DecimalType:
        if not self.skip("("):
            return t.DecimalType(10, 0)
        precision, scale = self._number(), 0
        if self.skip(","):
            scale = self._number()
        self.sign(")")
        if not 1 <= precision <= 38 or scale > precision:
            raise self.bad(f"decimal({precision},{scale}) does not exist")
        return t.DecimalType(precision, scale)

    def _number(self) -> int:
        text = self.take("a number")
        if not text.isdigit():
            raise self.bad(f"a number expected, not {text!r}")
        return int(text)
