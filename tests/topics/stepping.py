"""Work that makes one call to the server at a time, when it is told to: whatever can come in between can be tried."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.capabilities import is_noscript
from conquiet.wire.connections import Connections
from conquiet.wire.parser import Reply

__all__ = ["Stepped"]

_WHOLE: Final = b"\r\nEVAL\r\n"
_TURNS: Final = 12
"""More turns of the loop than anything takes from one answer to the next question."""


class _SteppedLink(Connections):
    """Asks for leave before each call."""

    def __init__(self, link: Connections) -> None:
        super().__init__(link.address)
        self._real = link
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.answered = asyncio.Event()
        self.is_dead = False

    async def call_many(self, key: str, commands: Sequence[bytes]) -> list[Reply]:
        if self.is_dead:
            raise asyncio.CancelledError
        if _WHOLE not in commands[0][:20]:  # else it is the same call again, by which the server gets to know a script
            leave = asyncio.get_running_loop().create_future()
            self.waiting.append(leave)
            await leave
        is_unknown = False
        try:
            replies = await self._real.call_many(key, commands)
            is_unknown = any(map(is_noscript, replies))
            return replies
        finally:
            if not is_unknown:
                self.answered.set()


class Stepped:
    """One piece of work, which goes on by as many calls to the server as it is let, or dies between two of them."""

    def __init__(self, instance: Instance, work: Callable[[Instance, Registry], Coroutine[Any, Any, Any]]) -> None:
        self._link = _SteppedLink(instance.link)
        self.instance = Instance(self._link, instance.keys, instance.clock)
        self.task = asyncio.get_running_loop().create_task(work(self.instance, Registry(self.instance)))

    @property
    def done(self) -> bool:
        return self.task.done()

    async def step(self) -> bool:
        """Let one call through, and return when the work wants another, has ended or sleeps; whether there was one."""
        await self._settle()
        waiting = self._link.waiting
        while waiting and waiting[0].done():  # whoever asked was cancelled
            waiting.popleft()
        if not waiting:
            return False
        self._link.answered.clear()
        waiting.popleft().set_result(None)
        await self._link.answered.wait()
        await self._settle()
        return True

    async def finish(self) -> int:
        """Let it make all the calls that it takes, and raise what it raises; how many there were."""
        calls = 0
        while await self.step():
            calls += 1
        assert self.task.done(), "it sleeps"
        self.task.result()
        return calls

    async def die(self) -> None:
        """End it where it is: it makes no call any more, not even to clear up."""
        self._link.is_dead = True
        self.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.task

    async def _settle(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
