"""A request to stop waiting that any thread or signal handler may make."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress

from conquiet.wire.shared_connection import running_loop

__all__ = ["Interrupt"]


class Interrupt:
    """Once requested, blocked reads under it end at once and no new one is written; it stays requested."""

    def __init__(self) -> None:
        self._requested = False
        self._wakers: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    @property
    def requested(self) -> bool:
        """Whether it was requested."""
        return self._requested

    def request(self) -> None:
        """Ask. Returns at once; safe from any thread and from a signal handler; may be called again."""
        self._requested = True
        for loop, wake in tuple(self._wakers):
            with suppress(RuntimeError):  # that loop has been closed, and so have its waits
                loop.call_soon_threadsafe(wake)

    async def ends(self, work: Callable[[], Awaitable[object]], within: float = 0.0) -> bool:
        """Do ``work``, but after a request only for so many seconds: then it is cancelled. Whether it has ended."""
        loop = running_loop()
        limit = asyncio.timeout(None)

        def hurry() -> None:
            if limit.when() is None:
                with suppress(RuntimeError):  # it has ended meanwhile
                    limit.reschedule(loop.time() + within)

        try:
            async with limit:
                with self.waking(hurry):
                    if self._requested:
                        hurry()
                    await work()
        except TimeoutError:
            if not limit.expired():
                raise
            return False
        return True

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Generator[None]:
        """Within the block, a request runs ``wake`` on the running loop.

        Check ``requested`` inside the block: a request made before it has no one to wake.
        """
        waker = (asyncio.get_running_loop(), wake)
        self._wakers.append(waker)
        try:
            yield
        finally:
            self._wakers.remove(waker)
