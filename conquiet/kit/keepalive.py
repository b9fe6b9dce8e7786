"""The one heartbeat loop. It beats on the private loop, where a handler that blocks its own loop cannot stop it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.loopthread import on_private_loop
from conquiet.kit.service import Background

__all__ = ["Keepalive"]

_log = logging.getLogger("conquiet.kit")
_JITTER: Final = 0.1
_chance = random.Random()  # its own: a program that seeds the shared one wants the same numbers each time
_AFTER_FAILURE: Final = 0.25


class Keepalive:
    """Calls ``beat`` every ``interval`` seconds, a little earlier at random so that many do not beat together.

    A beat that fails is logged and tried again soon: one lost answer is no reason to lose a lease. ``beat`` runs on
    the private loop, so whatever it shares with the rest of the program must be safe to share between threads.
    """

    def __init__(self, beat: Callable[[], Awaitable[None]], interval: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._beat = beat
        self._interval = interval
        self._clock = clock
        self._background = Background()
        self._is_over = False

    async def start(self) -> None:
        """Begin; the first beat comes after one interval."""
        self._is_over = False
        await on_private_loop(self._start())

    async def aclose(self) -> None:
        """Stop; when this returns no beat is under way, and none follows, even if the last one fails at its end."""
        self._is_over = True
        await on_private_loop(self._background.aclose())

    async def _start(self) -> None:
        self._background.start(self._run(), "keepalive")

    async def _run(self) -> None:
        pause = self._interval
        while True:
            await self._clock.sleep(pause * (1 - _JITTER * _chance.random()))
            if self._is_over:
                return
            try:
                await self._beat()
                pause = self._interval
            except asyncio.CancelledError:
                raise
            except Exception as error:
                _log.warning("a heartbeat failed, the next follows soon: %s", error)
                pause = self._interval * _AFTER_FAILURE
