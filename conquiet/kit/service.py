"""Background work with an owner: the one place where tasks are started."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import anyio

__all__ = ["MOMENT", "Background", "ended", "to_its_end"]

_T = TypeVar("_T")
_log = logging.getLogger("conquiet.kit")
MOMENT: Final = 1.0
"""Seconds that an end may take, whatever the server does."""
_BREATH: Final = 0.05
"""Seconds of its time that are left to work which is cancelled at the end of it."""


class Background:
    """Tasks that belong to one object and never outlive it.

    ``start`` keeps a task referenced until it has ended; ``aclose`` cancels what still runs and waits for it.
    A task reports its outcome to those that await it; the owner adds nothing and hides nothing.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.over: Callable[[asyncio.Task[Any]], None] = self._tasks.discard
        """Tells that a task has ended, or ends now."""

    def start(
        self, work: Coroutine[Any, Any, _T], name: str, context: contextvars.Context | None = None
    ) -> asyncio.Task[_T]:
        """Run ``work`` beside the caller, on the running loop, in a copy of the caller's context if none is given."""
        task = self.begin(asyncio.get_running_loop(), work, name, context)
        task.add_done_callback(self.over)
        return task

    def begin(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, _T],
        name: str,
        context: contextvars.Context | None,
    ) -> asyncio.Task[_T]:
        """As :meth:`start`, for work that calls ``over`` as its last step: cheaper than a callback of the loop."""
        task = loop.create_task(work, name=f"conquiet-{name}", context=context)
        if not task.done():  # as a loop may have it whose tasks begin at once
            self._tasks.add(task)
        return task

    async def aclose(self) -> None:
        """Cancel what runs, and return when all of it has ended. What a former loop left has ended with it."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        for task in tasks:
            task.cancel()
        if tasks:
            # Not ``gather``: cancelled while it waits, it would cancel them once more, in the middle of their end.
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # nothing else retrieves what went wrong at its end


async def to_its_end(work: Coroutine[Any, Any, None], name: str, within: float = math.inf) -> None:
    """Return once ``work`` has ended, however often the caller is cancelled meanwhile, by tasks or by scopes.

    For leaving in good order. The cancellation is raised afterwards. What has not ended ``within`` so many seconds is
    cancelled and left behind, with a line in the log.
    """
    task = asyncio.get_running_loop().create_task(work, name=f"conquiet-{name}")
    if not await ended(task, within):
        _log.warning("%s did not end within %g s, and is not waited for", task.get_name(), within)


async def ended(task: asyncio.Task[None], within: float = math.inf) -> bool:
    """As :func:`to_its_end`, for work that has begun, and for which others may wait as well; whether it was in time."""
    is_in_time, cancelled = False, None
    with anyio.CancelScope(shield=True):
        cancelled = await _waited(task, max(within - _BREATH, within / 2))
        is_in_time = task.done()
        if not is_in_time:
            task.cancel()
            task.add_done_callback(_heed)
            cancelled = await _waited(task, _BREATH) or cancelled
    if is_in_time:
        task.result()
    if cancelled is not None:
        raise cancelled
    return is_in_time


async def _waited(task: asyncio.Task[None], seconds: float) -> asyncio.CancelledError | None:
    """Wait for a task; the cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not task.done() and (left := until - loop.time()) > 0:
        try:
            await asyncio.wait([task], timeout=None if math.isinf(left) else left)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _heed(task: asyncio.Task[None]) -> None:
    """Nobody else asks for what went wrong at the end of work that was too late."""
    if not task.cancelled():
        task.exception()
