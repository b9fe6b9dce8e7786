"""Reading a stream page by page, when the size of its entries is not known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from conquiet.wire.parser import Reply
from conquiet.wire.streams import Entry

__all__ = ["Pace", "paged"]

_BYTES: Final = 4 << 20
"""What an answer should have at limit: a server copies that in a few milliseconds."""
_FIRST: Final = 16
_FASTER: Final = 4
_SAMPLE: Final = 16


class Pace:
    """The size of the next page: few entries at first, then as many as the last ones were small, up to ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = min(limit, _FIRST)

    def saw(self, page: Sequence[Entry]) -> None:
        """Go by the entries of the page that was read: by some of them, for each look costs time."""
        step = max(len(page) // _SAMPLE, 1)
        largest = max((sum(map(len, words)) for _, words in page[::step]), default=0)
        self.count = max(1, min(self._limit, self.count * _FASTER, _BYTES // max(largest, 1)))


async def paged(
    ask: Callable[..., Awaitable[Reply]], key: str, start: str, end: str, limit: int
) -> AsyncIterator[list[Entry]]:
    """The entries from ``start`` to ``end`` in pages of up to ``limit`` and of some megabytes."""
    pace = Pace(limit)
    while True:
        asked = pace.count
        page = await ask("XRANGE", key, start, end, "COUNT", asked)
        yield page
        if len(page) < asked:
            return
        pace.saw(page)
        start = f"({page[-1][0].decode()}"
