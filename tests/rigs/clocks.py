"""A clock that can be moved, and that tells who waits by it: tests wait for the waiters instead of sleeping."""

from __future__ import annotations

import asyncio

from conquiet.kit.clock import ManualClock
from conquiet.kit.loopthread import PRIVATE_LOOP
from tests.rigs.waiting import eventually

__all__ = ["WatchedClock", "next_beat"]


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


async def next_beat(clock: ManualClock, hearts: int = 1) -> float:
    """In how many seconds the next heartbeat is due; returns once so many ``hearts`` wait for their time."""
    due: list[float] = []

    def is_there() -> bool:
        loop, now = PRIVATE_LOOP.loop(), clock.monotonic()
        due[:] = [one.deadline - now for one in list(clock._sleepers) if one.loop is loop and one.deadline > now]
        return len(due) >= hearts

    await eventually(is_there, f"{hearts} heartbeats wait for their time")
    return min(due)
