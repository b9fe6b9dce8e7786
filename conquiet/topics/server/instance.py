"""Where topics live: the connections, the names of the keys and the clock that every module here needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, run, run_many
from conquiet.wire.streams import pack

__all__ = ["Instance"]

_PATIENCE: Final = 1.0
"""Seconds for which a call that can be repeated is tried again."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Connections to the servers, the names of the keys there, and the clock that decides."""

    link: Connections
    keys: Keys = field(default_factory=Keys)
    clock: Clock = SYSTEM_CLOCK

    async def ask(self, command: str, key: str, *words: str | bytes | int) -> Reply:
        """The reply to one command on ``key``."""
        return await self.link.call(key, pack(command, key, *words))

    async def enlist(self, key: str, member: str) -> None:
        """Put ``member`` into the set ``key``, unless it is there: a server whose memory is full refuses even that."""
        if not await self.ask("SISMEMBER", key, member):
            await self.ask("SADD", key, member)

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
