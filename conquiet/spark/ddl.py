"""A schema written as DDL, read without a JVM: the processes in which Spark plans a Python source have none.

What Spark's own parser makes of the same text is what comes out, for the types that a JSON payload can have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from conquiet.errors import ConfigError

__all__ = ["parse"]

_SIMPLE: Final[dict[str, Callable[[], DataType]]] = {
    "BIGINT": LongType,
    "BINARY": BinaryType,
    "BOOLEAN": BooleanType,
    "BYTE": ByteType,
    "DATE": DateType,
    "DOUBLE": DoubleType,
    "FLOAT": FloatType,
    "INT": IntegerType,
    "INTEGER": IntegerType,
    "LONG": LongType,
    "REAL": FloatType,
    "SHORT": ShortType,
    "SMALLINT": ShortType,
    "STRING": StringType,
    "TIMESTAMP": TimestampType,
    "TIMESTAMP_LTZ": TimestampType,
    "TIMESTAMP_NTZ": TimestampNTZType,
    "TINYINT": ByteType,
}
_DECIMALS: Final = frozenset({"DEC", "DECIMAL", "NUMERIC"})
_TEXTS: Final[dict[str, Callable[[int], DataType]]] = {
    "CHAR": CharType,
    "CHARACTER": CharType,
    "VARCHAR": VarcharType,
}
_NESTED: Final = frozenset({"ARRAY", "MAP", "STRUCT"})
_KNOWN: Final = _SIMPLE.keys() | _DECIMALS | _TEXTS.keys() | _NESTED

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<word>\w+)
      | `(?P<quoted>(?:[^`]|``)+)`
      | (?P<text>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
      | (?P<sign>[<>(),:])
    )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_ESCAPE: Final = re.compile(r"\\(.)|''|\"\"", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "0": "\0", "Z": "\x1a", "%": "\\%", "_": "\\_"}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def parse(text: str) -> StructType:
    """The struct that ``text`` describes: ``a INT, b STRING``, or ``struct<a: int, b: string>``.

    A ``ConfigError`` names the option ``schema``, the place and what was found there.
    """
    return _Parser(text).schema()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._next = 0

    def schema(self) -> StructType:
        whole = self._word(0) == "STRUCT" and self._peek(1).text == "<"
        if whole:
            self._next = 2
        fields = self._fields()
        if whole:
            self._sign(">")
        if self._peek().kind != "end":
            self._refuse("a comma or the end")
        return StructType(fields)

    def _fields(self) -> list[StructField]:
        fields = [self._field()]
        while self._taken(","):
            fields.append(self._field())
        return fields

    def _field(self) -> StructField:
        name = self._peek()
        if name.kind not in ("word", "quoted") or (name.kind == "word" and name.text.isdigit()):
            self._refuse("the name of a field")
        self._next += 1
        self._taken(":")
        kind = self._type()
        nullable = True
        if self._word() == "NOT" and self._word(1) == "NULL":
            self._next += 2
            nullable = False
        metadata = {"comment": self._comment()} if self._word() == "COMMENT" else None
        return StructField(name.text, kind, nullable, metadata)

    def _comment(self) -> str:
        self._next += 1
        token = self._peek()
        if token.kind != "text":
            self._refuse("the comment in quotes")
        self._next += 1
        return token.text

    def _type(self) -> DataType:
        name = self._word()
        if not name:
            self._refuse("a type")
        if name not in _KNOWN:
            self._refuse("a type that a JSON payload can have")
        self._next += 1
        if name in _SIMPLE:
            return _SIMPLE[name]()
        if name in _DECIMALS:
            return self._decimal()
        if name in _TEXTS:
            numbers = self._numbers(1)
            return _TEXTS[name](numbers[0]) if numbers else self._refuse("a length in parentheses")
        return self._nested(name)

    def _nested(self, name: str) -> DataType:
        self._sign("<")
        if name == "STRUCT":
            made: DataType = StructType(self._fields())
        elif name == "ARRAY":
            made = ArrayType(self._type())
        else:
            key = self._type()
            self._sign(",")
            made = MapType(key, self._type())
        self._sign(">")
        return made

    def _decimal(self) -> DecimalType:
        at = self._next
        numbers = self._numbers(2)
        precision = numbers[0] if numbers else 10
        scale = numbers[1] if len(numbers) == 2 else 0
        if not (1 <= precision <= 38 and scale <= precision):
            self._next = at
            self._refuse("a precision from 1 to 38 and a scale up to the precision")
        return DecimalType(precision, scale)

    def _numbers(self, most: int) -> list[int]:
        numbers: list[int] = []
        if not self._taken("("):
            return numbers
        while True:
            token = self._peek()
            if token.kind != "word" or not token.text.isdigit():
                self._refuse("a number")
            self._next += 1
            numbers.append(int(token.text))
            if len(numbers) == most or not self._taken(","):
                break
        self._sign(")")
        return numbers

    def _peek(self, ahead: int = 0) -> _Token:
        place = self._next + ahead
        return self._tokens[place] if place < len(self._tokens) else _Token("end", "", len(self._text))

    def _word(self, ahead: int = 0) -> str:
        token = self._peek(ahead)
        return token.text.upper() if token.kind == "word" else ""

    def _taken(self, sign: str) -> bool:
        token = self._peek()
        if token.kind != "sign" or token.text != sign:
            return False
        self._next += 1
        return True

    def _sign(self, sign: str) -> None:
        if not self._taken(sign):
            self._refuse(f"{sign!r}")

    def _refuse(self, wanted: str) -> NoReturn:
        token = self._peek()
        found = "its end" if token.kind == "end" else repr(token.text)
        raise ConfigError(f"schema: expected {wanted} at character {token.at}, found {found}: {self._text!r}")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            rest = text[at:].lstrip()
            raise ConfigError(f"schema: cannot read {rest[:20]!r} at character {len(text) - len(rest)}: {text!r}")
        kind = match.lastgroup or ""
        token = match[kind]
        if kind == "quoted":
            token = token.replace("``", "`")
        elif kind == "text":
            token = _ESCAPE.sub(_unescaped, token[1:-1])
        tokens.append(_Token(kind, token, match.start(kind)))
        at = match.end()
    return tokens


def _unescaped(match: re.Match[str]) -> str:
    letter = match[1]
    return match[0][0] if letter is None else _ESCAPED.get(letter, letter)
