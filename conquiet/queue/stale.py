"""Finding messages that were pending for long, at a cost that does not grow with the pending list."""

from __future__ import annotations

from typing import Final

from conquiet.wire import streams
from conquiet.wire.connections import Connections
from conquiet.wire.streams import Pending

__all__ = ["StaleSearch"]

_PAGE: Final = 500
_PAGES: Final = 10
"""How many pages of the pending list one search reads: with ``IDLE`` the server would read all of it at once."""


class StaleSearch:
    """Goes through the pending list of a group, in the order of the IDs, and begins anew at its end."""

    def __init__(self, link: Connections, stream: str, group: str) -> None:
        self._link = link
        self._stream = stream
        self._group = group
        self._from = "-"

    async def find(self, idle_ms: int, count: int) -> list[Pending]:
        """Up to ``count`` that are idle for so long, of the 5,000 behind those that the last search has seen."""
        found: dict[str, Pending] = {}
        begin, has_wrapped = self._from, self._from == "-"
        for _ in range(_PAGES):
            page = await self._page(begin)
            late = [row for row in page if row.idle_ms >= idle_ms][: count - len(found)]
            found.update((row.id, row) for row in late)
            if len(found) >= count:
                begin = f"({late[-1].id}"
                break
            if len(page) == _PAGE:
                begin = f"({page[-1].id}"
                continue
            begin = "-"
            if has_wrapped:
                break
            has_wrapped = True
        self._from = begin
        return list(found.values())

    async def _page(self, begin: str) -> list[Pending]:
        command = streams.xpending(self._stream, self._group, begin=begin, count=_PAGE)
        return streams.pending_of(await self._link.call(self._stream, command))
