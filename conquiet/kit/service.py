"""Background work with an owner: the one place where tasks are started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["Background"]


class Background:
    """Tasks that belong to one object and never outlive it.

    ``start`` keeps a task referenced until it has ended; ``aclose`` cancels what still runs and waits for it.
    A task reports its outcome to whoever awaits it; the owner adds nothing and hides nothing.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` beside the caller, on the running loop."""
        task = asyncio.get_running_loop().create_task(work, name=f"conquiet-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Cancel what runs, and return when all of it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
