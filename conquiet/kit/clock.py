"""Time as the library sees it, so that tests can move it.

A clock decides only how long something waits here. What has expired is decided by the server's time, to which
``offset_ms`` is added.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Final

from conquiet.kit import rules

__all__ = ["SYSTEM_CLOCK", "Clock", "ManualClock"]


class Clock:
    """The time as it is."""

    @property
    def offset_ms(self) -> int:
        """What to add to the server's time; 0 but in tests."""
        return 0

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Return when ``event`` is set, or after ``seconds``; whether it was set."""
        try:
            async with asyncio.timeout(seconds):
                return await event.wait()
        except TimeoutError:
            return event.is_set()


SYSTEM_CLOCK: Final = Clock()
"""The clock where none is given."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sleeper:
    loop: asyncio.AbstractEventLoop
    deadline: float
    limit: asyncio.Timeout


class ManualClock(Clock):
    """A clock that goes on by itself and can be moved forward, from any thread and for sleepers on any loop.

    A sleep or a wait ends when its time is up, whether that time was lived through or skipped.
    """

    def __init__(self) -> None:
        # Another thread may move the clock at the same moment: appending to a list is atomic, adding up is not.
        self._moves: list[float] = []
        self._sleepers: set[_Sleeper] = set()

    @property
    def offset_ms(self) -> int:
        """How far the clock was moved so far."""
        return round(math.fsum(self._moves) * 1000)

    def monotonic(self) -> float:
        """Seconds since some moment, those that were skipped included."""
        return time.monotonic() + math.fsum(self._moves)

    def advance(self, seconds: float) -> None:
        """Skip ``seconds``; every wait that is due by then ends as soon as its loop comes to it."""
        self._moves.append(rules.number("seconds", seconds, least=0))
        for sleeper in list(self._sleepers):
            try:
                sleeper.loop.call_soon_threadsafe(self._schedule, sleeper)
            except RuntimeError:  # its loop was closed over its head
                self._sleepers.discard(sleeper)

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``, lived through or skipped."""
        await self.wait(asyncio.Event(), seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Return when ``event`` is set, or after ``seconds``, lived through or skipped; whether it was set."""
        deadline = self.monotonic() + seconds
        sleeper = _Sleeper(asyncio.get_running_loop(), deadline, asyncio.timeout(None))
        # Known to ``advance`` before it looks at the clock, so that no move falls in between.
        self._sleepers.add(sleeper)
        try:
            async with sleeper.limit:
                self._schedule(sleeper)
                return await event.wait()
        except TimeoutError:
            return event.is_set()
        finally:
            self._sleepers.discard(sleeper)

    def _schedule(self, sleeper: _Sleeper) -> None:
        """Wake it when its deadline comes; on its own loop."""
        if sleeper in self._sleepers and not sleeper.limit.expired():
            sleeper.limit.reschedule(sleeper.loop.time() + sleeper.deadline - self.monotonic())
