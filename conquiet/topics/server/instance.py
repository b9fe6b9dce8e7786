"""Where an instance's topics live: what every module of the room needs and none of them owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, run, run_many

__all__ = ["Site"]

_PATIENCE: Final = 1.0
"""Seconds for which a call that can be repeated is tried again."""


@dataclass(frozen=True, slots=True)
class Site:
    """A link to the servers, the names of the keys there, and the clock that decides."""

    link: Connections
    keys: Keys = field(default_factory=Keys)
    clock: Clock = SYSTEM_CLOCK

    async def run(self, key: str, call: Call) -> Reply:
        """The reply to one script on ``key``."""
        return await run(self.link, key, call)

    async def insist(self, key: str, call: Call) -> Reply:
        """The reply to a script that can be repeated, tried again for a moment if there is none."""
        until = self.clock.monotonic() + _PATIENCE
        while True:
            try:
                return await self.run(key, call)
            except QueueError:
                if self.clock.monotonic() >= until:
                    raise
                await self.clock.sleep(_PATIENCE / 5)

    async def run_many(self, key: str, calls: list[Call]) -> list[Reply]:
        """The replies to scripts for the node of ``key``, error replies as values."""
        return await run_many(self.link, key, calls)
