"""The connections to one node for commands that block: as many as there are commands, and few when there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from conquiet.kit.service import Background
from conquiet.wire.blocking_connection import Blocking, BlockingConnection
from conquiet.wire.parser import Reply

__all__ = ["BlockingPool"]

_KEPT: Final = 4
"""How many idle connections stay open."""
_KEPT_FOR: Final = 30.0
"""Seconds for which an idle connection stays open at most."""


class BlockingPool:
    """Gives each command a connection of its own, the one that was used last if one is idle."""

    def __init__(self, make: Callable[[], BlockingConnection]) -> None:
        self._make = make
        self._idle: list[tuple[BlockingConnection, float]] = []
        self._in_use: set[BlockingConnection] = set()
        self._closing = Background()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def call(self, commands: Sequence[bytes], how: Blocking) -> Reply | None:
        """As :meth:`BlockingConnection.call`."""
        lane = self._idle.pop()[0] if self._idle else self._make()
        self._in_use.add(lane)
        try:
            return await lane.call(commands, how)
        finally:
            self._in_use.discard(lane)
            if not self._closed:  # else it is closed already
                await self._give_back(lane)

    async def aclose(self) -> None:
        """Close all of them; commands that still block fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        lanes = [*(lane for lane, _ in self._idle), *self._in_use]
        self._idle.clear()
        await asyncio.gather(self._closing.aclose(), *(lane.aclose() for lane in lanes))

    async def _give_back(self, lane: BlockingConnection) -> None:
        if not lane.is_open or len(self._idle) >= _KEPT:
            await lane.aclose()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((lane, loop.time()))
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(_KEPT_FOR, self._expire)

    def _expire(self) -> None:
        """Close what was idle for too long, which are the first."""
        assert self._loop is not None
        self._timer = None
        until = self._loop.time() - _KEPT_FOR
        while self._idle and self._idle[0][1] <= until:
            self._closing.start(self._idle.pop(0)[0].aclose(), "close-idle")
        if self._idle:
            self._timer = self._loop.call_at(self._idle[0][1] + _KEPT_FOR, self._expire)
