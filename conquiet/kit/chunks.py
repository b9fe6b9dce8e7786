"""Many things in parts that one call can carry, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["by_number", "by_size", "chunks", "spans"]

_T = TypeVar("_T")


def spans(sizes: Sequence[int], limit: int, limit_bytes: int) -> Iterator[slice]:
    """Where to cut: up to ``limit`` things at a time that come to ``limit_bytes``, or one that alone has more."""
    if sizes and len(sizes) <= limit and sum(sizes) <= limit_bytes:
        yield slice(None)
        return
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start >= limit or total + size > limit_bytes):
            yield slice(start, at)
            start, total = at, 0
        total += size
    if sizes:
        yield slice(start, None)


def chunks(things: Sequence[_T], limit: int, limit_bytes: int, size: Callable[[_T], int]) -> Iterator[Sequence[_T]]:
    """Up to ``limit`` things at a time, and fewer where their sizes come to more than ``limit_bytes``."""
    for span in spans(list(map(size, things)), limit, limit_bytes):
        yield things[span]


def by_number(things: Sequence[_T], limit: int) -> Iterator[Sequence[_T]]:
    """Up to ``limit`` things at a time."""
    for start in range(0, len(things), limit):
        yield things[start : start + limit]


def by_size(things: Sequence[_T], limit_bytes: int, size: Callable[[_T], int]) -> Iterator[Sequence[_T]]:
    """As many things at a time as come to ``limit_bytes``, or one that alone has more."""
    return chunks(things, sys.maxsize, limit_bytes, size)
