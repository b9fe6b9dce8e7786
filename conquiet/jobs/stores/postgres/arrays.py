"""Arrays as PostgreSQL sends them in binary: packed here, because the driver's own way takes ten times as long."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from conquiet.errors import ConfigError

__all__ = ["Array", "Blobs", "Integers", "Texts"]

_T = TypeVar("_T")
_HEAD: Final = struct.Struct("!iiIii")
_EMPTY: Final = struct.Struct("!iiI")
_LENGTH: Final = struct.Struct("!i")
_INTEGER: Final = struct.Struct("!iq")
_NULL: Final = _LENGTH.pack(-1)


class Array:
    """An array of one dimension, ready to be sent."""

    __slots__ = ("data",)
    element: int
    """The type of its elements, by PostgreSQL's number."""
    oid: int
    """Its own type."""

    def __init__(self, parts: Sequence[bytes], count: int, has_null: bool) -> None:
        head = _HEAD.pack(1, has_null, self.element, count, 1) if count else _EMPTY.pack(0, 0, self.element)
        self.data = b"".join((head, *parts))


class Texts(Array):
    """``text[]``."""

    __slots__ = ()
    element, oid = 25, 1009

    def __init__(self, values: Iterable[str]) -> None:
        values = list(values)
        different, times = _folded(values)
        try:
            blobs = [value.encode() for value in different]
        except UnicodeEncodeError as error:
            raise ConfigError(f"PostgreSQL keeps text as UTF-8, which cannot carry {error.object!r}") from None
        parts = [part for blob in blobs for part in (_LENGTH.pack(len(blob)), blob)]
        super().__init__(parts * times, len(values), False)


class Blobs(Array):
    """``bytea[]``."""

    __slots__ = ()
    element, oid = 17, 1001

    def __init__(self, values: Sequence[bytes | None]) -> None:
        parts: list[bytes] = []
        different, times = _folded(values)
        for blob in different:
            parts += (_NULL,) if blob is None else (_LENGTH.pack(len(blob)), blob)
        super().__init__(parts * times, len(values), None in different)


class Integers(Array):
    """``bigint[]``."""

    __slots__ = ()
    element, oid = 20, 1016

    def __init__(self, values: Sequence[int | None]) -> None:
        different, times = _folded(values)
        try:
            parts = [_NULL if value is None else _INTEGER.pack(8, value) for value in different]
        except struct.error:
            large = next(value for value in values if value is not None and not -(2**63) <= value < 2**63)
            raise ConfigError(f"PostgreSQL keeps integers of 64 bits, which {large!r} is not") from None
        super().__init__(parts * times, len(values), None in different)


def _folded(values: Sequence[_T]) -> tuple[Sequence[_T], int]:
    """The values, and how often they come: once, unless all are the same, as most of what is said of jobs is."""
    is_one = len(values) > 1 and values[0] == values[-1] and values.count(values[0]) == len(values)
    return (values[:1], len(values)) if is_one else (values, 1)
