"""JSON in and out, so that what was sent comes back equal or is refused before it is sent.

orjson writes (fastest, and it refuses by itself most of what JSON cannot carry); msgspec reads (faster than
orjson there, and it keeps integers of any size, which orjson would turn into floats).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias, cast

import msgspec
import orjson

from conquiet.errors import PayloadError

__all__ = ["MAX_DEPTH", "UNREADABLE", "decode", "encode", "encode_object"]

MAX_DEPTH: Final = 254
"""How deep arrays and objects may be nested: orjson's own limit."""

_Path: TypeAlias = "tuple[_Path, str] | None"

# Values of exactly these types survive JSON as they are, but for floats without a number (see below).
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_LARGEST: Final = 2**64 - 1
_SMALLEST: Final = -(2**63)

_write = orjson.dumps
_join = b"".join
_SHORT: Final = 1000

decode: Final = msgspec.json.Decoder().decode
"""The JSON value in some bytes; one of ``UNREADABLE`` if they are not exactly one valid JSON text in UTF-8."""

UNREADABLE: Final = (ValueError, RecursionError)
"""What :func:`decode` raises: malformed, not UTF-8, or nested too deep."""


def encode(value: object) -> bytes:
    """``value`` as JSON in UTF-8, such that :func:`decode` gives back an equal value.

    Raises :class:`PayloadError`, which names the first place that JSON would change or cannot carry.
    """
    try:
        data = _write(value)
        if decode(data) == value:
            return _own(data)
    except (TypeError, *UNREADABLE):
        pass
    raise _refusal(value)


def encode_object(payload: object) -> bytes:
    """As :func:`encode`, for the JSON objects that the queue carries: ``payload`` must be a ``dict``."""
    # The common case, a flat dict of plain values, needs no second look: orjson refuses keys that are not
    # strings, large integers and lone surrogates; a float that is no number is the one thing it changes,
    # and that shows as a null.
    if type(payload) is dict and _PLAIN.issuperset(map(type, cast("dict[Any, Any]", payload).values())):
        try:
            data = _write(payload)
        except TypeError:
            raise _refusal(cast("object", payload)) from None
        if b"null" not in data:
            return _join((data, b"")) if len(data) < _SHORT else data  # as _own does
    if not isinstance(payload, dict):
        raise PayloadError("$", f"must be a dict, not {type(payload).__name__}")
    return encode(cast("dict[Any, Any]", payload))


def _own(data: bytes) -> bytes:
    # What orjson returns comes out of a kilobyte of fresh memory, however short it is. In a batch that is kept, to get
    # that costs five times as much as all the rest; a copy gives it back at once.
    return _join((data, b"")) if len(data) < _SHORT else data


def _refusal(value: object) -> PayloadError:
    for path, reason in _faults(value):
        return PayloadError(_render(path), reason)
    return PayloadError("$", "would not come back equal to what was sent")


def _faults(value: object) -> Iterator[tuple[_Path, str]]:
    """The places that JSON cannot carry, in reading order; iterative, since the input may be very deep."""
    stack: list[tuple[_Path, object, int]] = [(None, value, 0)]
    while stack:
        path, item, depth = stack.pop()
        if (reason := _fault(item)) is not None:
            yield path, reason
        elif isinstance(item, dict | list):
            if depth >= MAX_DEPTH:
                yield path, f"is nested deeper than {MAX_DEPTH} levels"
                return
            children = _children(cast("dict[Any, Any] | list[Any]", item))
            stack.extend(reversed([((path, label), child, depth + 1) for label, child in children]))


def _children(item: dict[Any, Any] | list[Any]) -> Iterator[tuple[str, object]]:
    if isinstance(item, list):
        yield from ((f"[{index}]", child) for index, child in enumerate(item))
        return
    for key, child in item.items():
        yield f".{key!s}", child


def _fault(item: object) -> str | None:
    if item is None or isinstance(item, bool | list):
        return None
    if isinstance(item, str):
        return None if _is_text(item) else "holds an unpaired surrogate"
    if isinstance(item, int):
        return None if _SMALLEST <= item <= _LARGEST else "is an integer outside 64 bits"
    if isinstance(item, float):
        return None if math.isfinite(item) else f"is {item!r}, which JSON has no number for"
    if isinstance(item, dict):
        return _key_fault(cast("dict[Any, Any]", item))
    return (
        f"is of type {type(item).__name__}, which JSON would change or cannot carry: "
        "send what JSON has, such as text, or give a topic a TypedCodec"
    )


def _key_fault(item: dict[Any, Any]) -> str | None:
    for key in item:
        if not isinstance(key, str):
            return f"has the key {key!r} of type {type(key).__name__}, but JSON keys are strings"
        if not _is_text(key):
            return f"has the key {key!r}, which holds an unpaired surrogate"
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _render(path: _Path, longest: int = 200) -> str:
    labels: list[str] = []
    while path is not None:
        path, label = path
        labels.append(label)
    text = "$" + "".join(reversed(labels)).encode(errors="backslashreplace").decode()
    return text if len(text) <= longest else f"{text[:longest]}..."
