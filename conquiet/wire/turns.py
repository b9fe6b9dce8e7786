"""Who may block at a node: so many at the same time, and each in its turn."""

from __future__ import annotations

import asyncio
from typing import Final

from conquiet.wire.interrupt import Interrupt

__all__ = ["Turns"]

_CROWDED: Final = 2.0
"""Seconds for which turns stay short after a group had to wait for one: it will come back."""


class Turns:
    """Lets at most ``limit`` commands block at a node, and the others wait in the order in which they came.

    While no group has to wait, a turn is long. A newcomer that finds no place interrupts the oldest long turn; from
    then on turns are short, so that each group has one soon.
    """

    def __init__(self, limit: int) -> None:
        self._places = asyncio.Semaphore(limit)
        self._crowded_until = float("-inf")
        self._long: list[Interrupt] = []
        self.heard_at = float("-inf")
        """Time of the loop at which the node last answered."""

    @property
    def are_scarce(self) -> bool:
        """Whether a newcomer would have to wait."""
        return self._places.locked()

    async def begin(self) -> tuple[Interrupt, bool]:
        """Return when it is the caller's turn, until :meth:`end`: what ends it early, and whether it may be long."""
        loop = asyncio.get_running_loop()
        if self._places.locked():
            self._crowded_until = loop.time() + _CROWDED
            if self._long:
                self._long.pop(0).request()
        await self._places.acquire()
        interrupt = Interrupt()
        is_long = loop.time() >= self._crowded_until
        if is_long:
            self._long.append(interrupt)
        return interrupt, is_long

    def end(self, interrupt: Interrupt) -> None:
        """The turn to which ``interrupt`` belongs is over."""
        if interrupt in self._long:
            self._long.remove(interrupt)
        self._places.release()
