"""A clock that can be moved, and that tells who waits by it: tests wait for the waiters instead of sleeping."""

from __future__ import annotations

import asyncio

from conquiet.kit.clock import ManualClock
from tests.rigs.waiting import eventually

__all__ = ["WatchedClock"]


class WatchedClock(ManualClock):
    """Counts the waits of what runs by it, on whatever thread and loop."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[float] = []

    @property
    def waits(self) -> int:
        """How many waits have begun so far; sleeps are waits too."""
        return len(self._begun)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """As it does, and it is counted."""
        self._begun.append(seconds)  # atomic, whatever the threads
        return await super().wait(event, seconds)

    async def waited_on(self, count: int = 1) -> None:
        """Return once so many wait at the same time."""
        await eventually(lambda: len(self._sleepers) >= count, f"{count} to wait, not {len(self._sleepers)}")

    async def waited_again(self, before: int) -> None:
        """Return once another wait has begun than the ``before`` that had begun then."""
        await eventually(lambda: self.waits > before, "another wait")
