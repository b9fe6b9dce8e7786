"""Where topics live: the connections, the names of the keys and the clock that every module here needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.policy import Backoff
from conquiet.kit.retrying import patiently
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, run, run_everywhere, run_many
from conquiet.wire.streams import pack

__all__ = ["Instance"]

_AGAIN: Final = Backoff(base=0.2, cap=0.2, kind="fixed")
_RETRIES: Final = 5
"""How often a call that can be repeated is sent again: for about a second."""


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

    async def insist(self, calls: Sequence[tuple[str, Call]]) -> list[Reply]:
        """The replies to scripts that can be repeated, each with one of its keys, in one write a node.

        Those without an answer are sent again for a moment.
        """
        replies: list[Reply] = [None] * len(calls)
        left = list(range(len(calls)))

        async def ask() -> None:
            found = await run_everywhere(self.link, [calls[at] for at in left])
            for at, reply in zip(left, found, strict=True):
                replies[at] = reply
            left[:] = [at for at in left if isinstance(replies[at], Exception)]
            if left:
                self.link.refuse(calls[left[0]][0], replies[left[0]])

        await patiently(self.clock, ask, backoff=_AGAIN, retries=_RETRIES)
        return replies

    async def run_many(self, key: str, calls: list[Call]) -> list[Reply]:
        """The replies to scripts for the node of ``key``, error replies as values."""
        return await run_many(self.link, key, calls)
