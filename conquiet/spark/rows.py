"""From the rows of a DataFrame to what an entry holds: payload, key, headers and ID, as texts.

A column of strings that is the payload is JSON text, and is written as it is. Everything else is written as Spark's
``to_json`` would: timestamps as ISO 8601 in UTC, decimals as numbers, digit by digit. What JSON cannot carry (binary,
NaN, infinity, intervals) is refused, with the place where it stands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final, cast

import msgspec
import orjson
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    YearMonthIntervalType,
)

from conquiet.errors import ConfigError, PayloadError

__all__ = ["Columns", "Layout", "Unfit", "UnfitPayload", "are_json", "as_texts", "by_type", "json_text"]

_KEYS: Final = (StringType, ByteType, ShortType, IntegerType, LongType)
_NOT_JSON: Final = (BinaryType, DayTimeIntervalType, YearMonthIntervalType)
_raw = msgspec.json.Decoder(msgspec.Raw)


class Unfit(Exception):
    """A value that cannot be sent: what is wrong with it. The caller, which knows the row, says where it was."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column!r} {reason}")
        self.column = column
        self.reason = reason

    def at(self, part: int, row: int) -> ConfigError:
        """What is said of the row."""
        return ConfigError(f"partition {part}, row {row}: {self}")


class UnfitPayload(Unfit):
    """A value that JSON cannot carry, or a payload that is none."""

    def at(self, part: int, row: int) -> ConfigError:
        """What is said of the row."""
        return PayloadError(f"partition {part}, row {row}, column {self.column!r}", self.reason)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns a user has named."""

    key: str | None = None
    payload: str | None = None
    headers: str | None = None
    id: str | None = None
    null_keys: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Which column is what, by its place; with no payload column, all but the headers are an object of their names."""

    names: tuple[str, ...]
    payload: int | None
    key: int | None
    headers: int | None
    id: int | None
    null_keys: bool

    @classmethod
    def of(cls, names: Sequence[str], wanted: Columns) -> Layout:
        """The layout of rows with these columns; ``ConfigError`` that names a column which is not there."""
        places = {name: at for at, name in enumerate(names)}
        if len(places) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise ConfigError(f"there are two columns {twice!r}")

        def place(option: str, column: str | None) -> int | None:
            if column is None:
                return None
            if column not in places:
                raise ConfigError(f"{option} is column {column!r}, but there are only {', '.join(names) or 'none'}")
            return places[column]

        payload = place("payload", wanted.payload or ("payload" if "payload" in places else None))
        fixed = payload is not None
        return cls(
            tuple(names),
            payload,
            place("key", wanted.key or ("key" if fixed and "key" in places else None)),
            place("headers", wanted.headers or ("headers" if fixed and "headers" in places else None)),
            place("idColumn", wanted.id),
            # A column that was not asked for may be empty: rows that were read from a topic may have no key.
            wanted.null_keys or wanted.key is None,
        )

    def check(self, schema: StructType) -> None:
        """Refuse columns of types that cannot be what they are to be."""
        fields = schema.fields
        for option, at in (("key", self.key), ("idColumn", self.id)):
            if at is not None and not isinstance(fields[at].dataType, _KEYS):
                raise ConfigError(
                    f"{option} is column {fields[at].name!r} of type {fields[at].dataType.simpleString()}: "
                    "strings or integers can be"
                )
        if self.headers is not None:
            kind = fields[self.headers].dataType
            inner = (kind.keyType, kind.valueType) if isinstance(kind, MapType) else (None,)
            if not all(isinstance(part, StringType) for part in inner):
                name = fields[self.headers].name
                raise ConfigError(f"headers is column {name!r} of type {kind.simpleString()}, not map<string,string>")
        for at, field in enumerate(fields):
            if at != self.headers and (self.payload is None or at == self.payload):
                _check_json(field.name, field.dataType)

    # --- rows ---------------------------------------------------------------------------------------------------

    def payload_of(self, values: Sequence[Any]) -> str:
        """The payload of a row, by its values."""
        if self.payload is not None:
            value = values[self.payload]
            return json_text(self.names[self.payload], value)
        return orjson.dumps(
            {
                name: _plain(name, value)
                for at, (name, value) in enumerate(zip(self.names, values, strict=True))
                if at != self.headers
            },
            option=orjson.OPT_PASSTHROUGH_SUBCLASS,
        ).decode()

    def key_of(self, value: Any) -> str | None:
        """A row's key."""
        assert self.key is not None
        if value is None:
            if self.null_keys:
                return None
            raise Unfit(self.names[self.key], "is null: a key is needed; nullKeys='allow' sends such rows without one")
        return _text(self.names[self.key], value)

    def headers_of(self, value: Any) -> str | None:
        """A row's headers."""
        assert self.headers is not None
        name = self.names[self.headers]
        if not value:
            return None
        pairs: Mapping[Any, Any] = dict(value)
        for header, text in pairs.items():
            if not isinstance(header, str) or not isinstance(text, str):
                raise Unfit(name, f"has the header {header!r}: {text!r}, which is not two strings")
        return orjson.dumps(pairs).decode()

    def id_of(self, value: Any) -> str:
        """A row's own ID."""
        assert self.id is not None
        if value is None or value == "":
            raise Unfit(self.names[self.id], "is null or empty: each row needs an ID")
        return _text(self.names[self.id], value)


def json_text(column: str, value: Any) -> str:
    """A payload as JSON: strings are JSON text already."""
    if isinstance(value, str) and not isinstance(value, _Value):
        try:
            _raw.decode(value)
        except (UnicodeEncodeError, msgspec.DecodeError) as error:
            raise UnfitPayload(column, f"is not JSON text: {error}") from None
        return value
    if value is None:
        raise UnfitPayload(column, "is null: a message has a payload")
    return orjson.dumps(_plain(column, value), option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()


def are_json(texts: Iterable[str | None]) -> bool:
    """Whether all of these are JSON texts."""
    try:
        deque(map(_raw.decode, cast("Iterable[str]", texts)), maxlen=0)
    except (TypeError, msgspec.DecodeError):
        return False
    return True


def as_texts(values: Sequence[Any]) -> Sequence[str] | None:
    """Strings, or integers as such; ``None`` if they are not all of one of these types, or no valid Unicode."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return list(map(str, values))
    if kinds != {str}:
        return None
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return None
    return values


def _text(column: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unfit(column, "is not valid Unicode") from None
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise Unfit(column, f"is a {type(value).__name__}: strings and integers can be keys and IDs")


def _plain(path: str, value: Any) -> Any:
    """``value`` as JSON has it."""
    convert = _CONVERT.get(type(value))  # pyright: ignore[reportUnknownArgumentType]
    if convert is not None:
        return convert(path, value)
    for kind, convert in _CONVERT.items():
        if isinstance(value, kind):
            return convert(path, value)
    raise UnfitPayload(path, f"is a {type(value).__name__}, which JSON cannot carry")


class _Value(str):
    """A text that is a value, and never JSON itself."""

    __slots__ = ()


def _as_is(path: str, value: Any) -> Any:
    return value


def _number(path: str, value: float) -> float:
    if not math.isfinite(value):
        raise UnfitPayload(path, f"is {value}, which JSON cannot carry")
    return value


def _decimal(path: str, value: Decimal) -> Any:
    if not value.is_finite():
        raise UnfitPayload(path, f"is {value}, which JSON cannot carry")
    return orjson.Fragment(format(value, "f").encode())


def _moment(path: str, value: datetime) -> str:
    # Rows have instants as naive local times.
    return value.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"


def _row(path: str, value: Row) -> dict[str, Any]:
    return {name: _plain(f"{path}.{name}", part) for name, part in value.asDict().items()}


def _object(path: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in value.items():
        if not isinstance(name, str) and (not isinstance(name, int) or isinstance(name, bool)):
            raise UnfitPayload(path, f"has the key {name!r}, and those of an object are strings")
        found[str(name)] = _plain(f"{path}.{name}", part)
    return found


def _list(path: str, value: Sequence[Any]) -> list[Any]:
    return [_plain(f"{path}[{at}]", part) for at, part in enumerate(value)]


_CONVERT: Final[Mapping[type, Callable[[str, Any], Any]]] = {
    _Value: lambda path, value: str(value),
    str: _as_is,
    bool: _as_is,
    int: _as_is,
    type(None): _as_is,
    float: _number,
    Decimal: _decimal,
    datetime: _moment,
    date: lambda path, value: value.isoformat(),
    Row: _row,
    dict: _object,
    list: _list,
    tuple: _list,
}
"""Subclasses come before what they are derived from."""


def _check_json(path: str, kind: DataType) -> None:
    if isinstance(kind, _NOT_JSON) or type(kind).__name__ in ("VariantType", "CalendarIntervalType", "TimeType"):
        raise PayloadError(path, f"is of type {kind.simpleString()}, which JSON cannot carry")
    if isinstance(kind, StructType):
        for field in kind.fields:
            _check_json(f"{path}.{field.name}", field.dataType)
    elif isinstance(kind, ArrayType):
        _check_json(f"{path}[]", kind.elementType)
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType | ByteType | ShortType | IntegerType | LongType | NullType):
            raise PayloadError(path, f"has keys of type {kind.keyType.simpleString()}, and those of JSON are strings")
        _check_json(f"{path}{{}}", kind.valueType)


def by_type(kind: DataType) -> Callable[[Any], Any] | None:
    """What makes of a value of ``kind``, from Arrow or from a row, one that tells by itself what it is.

    ``None`` where they are the same.
    """
    if isinstance(kind, TimestampNTZType):
        return lambda moment: None if moment is None else _Value(moment.isoformat())
    if isinstance(kind, MapType):
        inner = by_type(kind.valueType)
        return lambda pairs: (
            None if pairs is None else {k: v if inner is None else inner(v) for k, v in dict(pairs).items()}
        )
    if isinstance(kind, ArrayType):
        inner = by_type(kind.elementType)
        if inner is None:
            return None
        return lambda values: None if values is None else [inner(value) for value in cast("list[Any]", values)]
    if isinstance(kind, StructType):
        inners = {field.name: found for field in kind.fields if (found := by_type(field.dataType)) is not None}
        return (lambda values: None if values is None else _filled(values, inners)) if inners else None
    return None


def _filled(values: Any, inners: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    named: dict[str, Any] = values.asDict() if isinstance(values, Row) else values
    return {name: inners[name](value) if name in inners else value for name, value in named.items()}
