"""An answer that is overdue ends its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["Watchdog"]

_ONCE_MORE: Final = 0.02


class Watchdog:
    """Calls ``abort`` when there was nothing but silence for too long where an answer is expected.

    One timer serves many calls: it is moved on when it goes off early, since arming and cancelling one for each
    call would cost a tenth of a round trip.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._deadline: float | None = None
        self._silence: float | None = None
        self._allowed = 0.0
        self._missed: float | None = None
        self._unsent: Callable[[], int] | None = None
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None
        self.overdue = 0.0
        """After how many seconds of silence the last expected answer was given up; 0 if it was not."""

    @property
    def is_expecting(self) -> bool:
        """Whether an answer is due at some time."""
        return self._deadline is not None

    def expect(self, now: float, seconds: float | None, silence: float | None) -> None:
        """From ``now`` on, something is to happen within ``seconds``, and then again within each ``silence``.

        ``None`` waits for ever.
        """
        self.overdue = 0.0
        self._silence = silence
        self._unsent = None
        if seconds is None:
            self._deadline = None
            return
        self._allowed = seconds
        self._deadline = deadline = now + seconds
        timer = self._timer
        if timer is None or timer.when() > deadline:
            self._arm(deadline)

    def moved(self) -> None:
        """A part of the question has left, or a part of the answer has come."""
        if self._deadline is not None and not self.overdue:
            unsent = self._unsent
            self.expect(asyncio.get_running_loop().time(), self._silence, self._silence)
            self._unsent = unsent

    def follow(self, unsent: Callable[[], int], size: int) -> None:
        """The question has ``size`` bytes, which may take long to leave: ``unsent`` tells how many have not yet."""
        self._unsent = unsent
        self._left = size

    def rest(self) -> None:
        """The answer is here."""
        self._deadline = None

    def cancel(self) -> None:
        """Let go of the timer."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _arm(self, deadline: float) -> None:
        self.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._look)
        elif self._missed != self._deadline:
            # The loop may have been kept from turning while the answer came: let its reader go first.
            self._missed = self._deadline
            self._timer = loop.call_later(_ONCE_MORE, self._look)
        elif self._has_left():
            self.moved()
        else:
            self.overdue = self._allowed
            self._abort()

    def _has_left(self) -> bool:
        """Whether something of a long question has left since the last look."""
        if self._unsent is None:
            return False
        before, self._left = self._left, self._unsent()
        return self._left != before  # not less: the layers beneath may make more of it, and not all of them show it
