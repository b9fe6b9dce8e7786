"""What one call makes a server do: the commands of each script, as ``MONITOR`` tells them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis

from tests.rigs.waiting import eventually

__all__ = ["Work", "watched"]

_END: Final = "the work is done"


@dataclass
class Work:
    """The words of all commands that each call has run inside the server; one entry a call, in order."""

    calls: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Of the call that did most."""
        return max(self.calls, default=0)

    def note(self, command: str, by_script: bool) -> None:
        if by_script and self.calls:
            self.calls[-1] += command.count(" ") + 1
        else:
            self.calls.append(0)


@asynccontextmanager
async def watched(url: str) -> AsyncGenerator[Work]:
    """Note what a server does from here to the end of the block; read it after that."""
    work, is_over = Work(), asyncio.Event()
    async with Redis.from_url(url, decode_responses=True) as client, client.monitor() as monitor:

        async def note() -> None:
            async for line in monitor.listen():
                if _END in line["command"]:
                    is_over.set()
                    return
                work.note(line["command"], line["client_type"] == "lua")

        noting = asyncio.create_task(note())
        try:
            yield work
            await client.echo(_END)
            await eventually(is_over.is_set, "the server to tell all")
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)
