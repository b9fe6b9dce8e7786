"""An answer that is overdue ends its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Watchdog"]


class Watchdog:
    """Calls ``abort`` when an expected answer has not come in time.

    One timer serves many calls: it is moved on when it goes off early, since arming and cancelling one for each
    call would cost a tenth of a round trip.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.overdue = False
        """Whether the last expected answer was given up."""

    def expect(self, seconds: float | None) -> None:
        """From now on, an answer is due within ``seconds``; ``None`` waits for ever."""
        self.overdue = False
        if seconds is None:
            self._deadline = None
            return
        loop = asyncio.get_running_loop()
        self._deadline = deadline = loop.time() + seconds
        if self._timer is None or self._timer.when() > deadline:
            self.cancel()
            self._timer = loop.call_at(deadline, self._look)

    def rest(self) -> None:
        """The answer is here."""
        self._deadline = None

    def cancel(self) -> None:
        """Let go of the timer."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._look)
        else:
            self.overdue = True
            self._abort()
