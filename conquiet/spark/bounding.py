"""Where a batch ends that may have only so many rows, or bytes.

Redis has no way to find an entry by its number: entries have to be counted. So once a batch is planned, the end of the
next one is looked for while Spark is at work on it.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.topics.outside import Instance, measure_after

__all__ = ["Bounds", "Counted"]

Counted: TypeAlias = tuple[int, str, int]
"""How many entries there are, the ID of the last one, and their bytes."""
_Range: TypeAlias = tuple[str, int, int | None]
"""The ID after which, the most entries, and the most bytes."""

_NOTHING: Final = (0, "", 0)


class Bounds:
    """Counts entries, and those of the batch after, too."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._background = Background()
        self._ahead: dict[str, tuple[_Range, str, asyncio.Future[Counted]]] = {}

    async def count(self, stream: str, since: str, until: str, limit: int, size: int | None) -> Counted:
        """As ``measure_after``; at once if it was looked for before."""
        wanted, end, found = self._ahead.pop(stream, (None, "", None))
        if found is not None and wanted == (since, limit, size):
            counted = await found
            if counted[0] and counted[1] != end:  # else there may be more by now
                return counted
        return await measure_after(self._instance, stream, since, until, limit, size)

    def look_ahead(self, stream: str, since: str, until: str, limit: int, size: int | None) -> None:
        """Begin to count for the next batch. The outcome may be left unused, and a failure is ignored."""
        future: asyncio.Future[Counted] = asyncio.get_running_loop().create_future()
        self._ahead[stream] = (since, limit, size), until, future
        self._background.start(self._count(stream, since, until, limit, size, future), "look-ahead")

    def forget(self, stream: str) -> None:
        """What was counted there is not true any more."""
        self._ahead.pop(stream, None)

    async def aclose(self) -> None:
        """Look for nothing any more."""
        await self._background.aclose()

    async def _count(
        self, stream: str, since: str, until: str, limit: int, size: int | None, future: asyncio.Future[Counted]
    ) -> None:
        found = _NOTHING
        try:
            found = await measure_after(self._instance, stream, since, until, limit, size)
        except QueueError:
            pass
        finally:
            if not future.done():  # who asked for it may have been cancelled
                future.set_result(found)
