"""The one heartbeat loop. It beats on the private loop, where a handler that blocks its own loop cannot stop it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.loopthread import on_private_loop
from conquiet.kit.retrying import Lines
from conquiet.kit.service import Background, to_its_end

__all__ = ["Keepalive"]

_log = logging.getLogger("conquiet.kit")
_JITTER: Final = 0.1
_chance = random.Random()  # its own: a program that seeds the shared one wants the same numbers each time
_AFTER_FAILURE: Final = 0.25
_SOON: Final = 0.25
"""Seconds that a cancelled beat has to end."""


class Keepalive:
    """Calls ``beat`` every ``interval`` seconds, a little earlier at random so that many do not beat together.

    A beat that fails is logged and tried again soon: one lost answer is no reason to lose a lease. ``beat`` runs on
    the private loop, so whatever it shares with the rest of the program must be safe to share between threads.

    With ``abandoned`` it ends with the loop on which it was started: when that loop was closed, nothing is left to keep
    alive, and ``abandoned`` is called instead of the next beat, on the private loop.
    """

    def __init__(
        self,
        beat: Callable[[], Awaitable[None]],
        interval: float,
        clock: Clock = SYSTEM_CLOCK,
        abandoned: Callable[[], Awaitable[None]] | None = None,
        lines: Lines | None = None,
    ) -> None:
        self._beat = beat
        self._interval = interval
        self._clock = clock
        self._abandoned = abandoned
        self._lines = lines or Lines(_log)
        self._background = Background()
        self._is_over = False
        self._owner: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Begin; the first beat comes after one interval. Cancelled, it has not begun."""
        self._is_over = False
        self._owner = asyncio.get_running_loop()
        try:
            await on_private_loop(self._start())
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop; when this returns no beat is under way, and none follows, even if the last one fails at its end.

        That holds as well when it raises a cancellation. A beat that does not end soon though it was cancelled, since
        it waits for the server to hear of that, is not waited for.
        """
        self._is_over = True
        await to_its_end(on_private_loop(self._background.aclose()), "silence", _SOON)

    async def _start(self) -> None:
        self._background.start(self._run(), "keepalive")

    async def _run(self) -> None:
        pause = self._interval
        while True:
            await self._clock.sleep(pause * (1 - _JITTER * _chance.random()))
            if self._is_over:
                return
            if self._abandoned is not None and self._owner is not None and self._owner.is_closed():
                await self._abandoned()
                return
            try:
                await self._beat()
                pause = self._interval
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._lines.warn("a heartbeat failed, the next follows soon", error)
                pause = self._interval * _AFTER_FAILURE
