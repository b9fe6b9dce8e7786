"""Where a batch ends that may have only so many rows.

Redis has no way to find an entry by its number: entries have to be counted. So once a batch is planned, the end of the
next one is looked for while Spark is at work on it.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.topics.outside import Instance, count_after

__all__ = ["Bounds"]

_Range: TypeAlias = tuple[str, str, int]
"""A stream, the ID after which, and the most entries."""

_NOTHING: Final = (0, "")


class Bounds:
    """Counts entries, and those of the batch after, too."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._background = Background()
        self._ahead: dict[str, tuple[_Range, asyncio.Future[tuple[int, str]]]] = {}

    async def count(self, stream: str, since: str, until: str, limit: int) -> tuple[int, str]:
        """As ``count_after``; at once if it was looked for before."""
        wanted, found = self._ahead.pop(stream, (None, None))
        if found is not None and wanted == (stream, since, limit):
            count, last = await found
            if count == limit:  # if it is less, there may be more by now
                return count, last
        return await count_after(self._instance, stream, since, until, limit)

    def look_ahead(self, stream: str, since: str, until: str, limit: int) -> None:
        """Begin to count for the next batch. The outcome may be left unused, and a failure is ignored."""
        future: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._ahead[stream] = (stream, since, limit), future
        self._background.start(self._count(stream, since, until, limit, future), "look-ahead")

    def forget(self, stream: str) -> None:
        """What was counted there is not true any more."""
        self._ahead.pop(stream, None)

    async def aclose(self) -> None:
        """Look for nothing any more."""
        await self._background.aclose()

    async def _count(
        self, stream: str, since: str, until: str, limit: int, future: asyncio.Future[tuple[int, str]]
    ) -> None:
        found = _NOTHING
        try:
            found = await count_after(self._instance, stream, since, until, limit)
        except QueueError:
            pass
        finally:
            if not future.done():  # who asked for it may have been cancelled
                future.set_result(found)
