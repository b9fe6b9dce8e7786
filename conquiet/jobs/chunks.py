"""Many things for a store, in parts that one call can carry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from conquiet.kit import chunks as cutting

__all__ = ["MOST", "chunks"]

_T = TypeVar("_T")
MOST: Final = 1000
"""How many things go into one call."""
_MOST_BYTES: Final = 4 << 20
"""How many bytes go together, unless one alone has more."""


_MOST_WORDS: Final = 3900
"""How many words go together: some managed services refuse a request of more than 3,999, keys included."""


def chunks(
    things: Sequence[_T], size: Callable[[_T], int], words: Callable[[_T], int] | None = None
) -> Iterator[Sequence[_T]]:
    """``things`` in order, a thousand at a time, and fewer where their sizes come to more than one call may have.

    ``words`` tells how many words a thing is in a request, of those that are asked for in their order.
    """
    for part in cutting.chunks(things, MOST, _MOST_BYTES, size):
        if words is None:
            yield part
        else:
            yield from cutting.chunks(part, MOST, _MOST_WORDS, words)
