"""How many entries to ask for at once, when nobody knows how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from conquiet.wire.streams import Entry

__all__ = ["Pace"]

_BYTES: Final = 4 << 20
"""What an answer should have at most: a server copies that in a few milliseconds."""
_FIRST: Final = 16
_FASTER: Final = 4
_SAMPLE: Final = 16


class Pace:
    """The size of the next page: few entries at first, then as many as the last ones were small, up to ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = min(most, _FIRST)

    def saw(self, page: Sequence[Entry]) -> None:
        """Go by the entries of the page that was read: by some of them, for each look costs time."""
        step = max(len(page) // _SAMPLE, 1)
        largest = max((sum(map(len, words)) for _, words in page[::step]), default=0)
        self.count = max(1, min(self._most, self.count * _FASTER, _BYTES // max(largest, 1)))
