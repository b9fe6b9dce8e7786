"""Background work with an owner: the one place where tasks are started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["Background", "to_its_end"]

_T = TypeVar("_T")


class Background:
    """Tasks that belong to one object and never outlive it.

    ``start`` keeps a task referenced until it has ended; ``aclose`` cancels what still runs and waits for it.
    A task reports its outcome to whoever awaits it; the owner adds nothing and hides nothing.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Run ``work`` beside the caller, on the running loop."""
        task = asyncio.get_running_loop().create_task(work, name=f"conquiet-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Cancel what runs, and return when all of it has ended. What a former loop left has ended with it."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(work: Coroutine[Any, Any, None], name: str) -> None:
    """Return once ``work`` has ended, however often the caller is cancelled meanwhile, by tasks or by scopes.

    For leaving in good order: ``work`` has to see to it that it ends soon. The cancellation is raised afterwards.
    """
    task = asyncio.get_running_loop().create_task(work, name=f"conquiet-{name}")
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
