"""Many things in parts that one call can carry, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["by_number", "by_size", "chunks"]

_T = TypeVar("_T")


def chunks(things: Sequence[_T], most: int, most_bytes: int, size: Callable[[_T], int]) -> Iterator[Sequence[_T]]:
    """Up to ``most`` things at a time, and fewer where their sizes come to more than ``most_bytes``."""
    for some in by_number(things, most):
        yield from by_size(some, most_bytes, size)


def by_number(things: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    """Up to ``most`` things at a time."""
    for start in range(0, len(things), most):
        yield things[start : start + most]


def by_size(things: Sequence[_T], most_bytes: int, size: Callable[[_T], int]) -> Iterator[Sequence[_T]]:
    """As many things at a time as come to ``most_bytes``, or one that alone has more."""
    sizes = list(map(size, things))
    if sum(sizes) <= most_bytes:
        if things:
            yield things
        return
    start = total = 0
    for at, add in enumerate(sizes):
        if at > start and total + add > most_bytes:
            yield things[start:at]
            start, total = at, 0
        total += add
    yield things[start:]
