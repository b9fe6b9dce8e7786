"""Waiting for conditions instead of sleeping, and rigs that outlive the event loop of one test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final, TypeVar

__all__ = ["LONG", "eventually", "held", "turns"]

LONG: Final = 20.0 * float(os.environ.get("CONQUIET_TEST_PATIENCE", "1"))
"""Seconds after which what should have happened by now is taken for never; not a measure of anything.

On a machine that has much else to do, ``CONQUIET_TEST_PATIENCE`` makes it longer.
"""

_POLL: Final = 0.01
_T = TypeVar("_T")


async def eventually(condition: Callable[[], Awaitable[bool] | bool], what: str, seconds: float = LONG) -> None:
    """Return once ``condition``, a plain or an async function, is true; the test fails if it never is."""
    try:
        async with asyncio.timeout(seconds) as limit:
            # redis-py swallows a cancellation now and then, that of the time-out too: then this loop ends by itself.
            while not await _holds(condition) and not limit.expired():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(_POLL)  # between two looks
            if limit.expired():
                raise TimeoutError
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None


async def turns(count: int = 20) -> None:
    """Let the event loop turn so often: enough for all that needs no answer from outside."""
    for _ in range(count):
        await asyncio.sleep(0)


async def _holds(condition: Callable[[], Awaitable[bool] | bool]) -> bool:
    met = condition()
    return met if isinstance(met, bool) else await met


@contextmanager
def held(rig: AbstractAsyncContextManager[_T]) -> Iterator[_T]:
    """``rig`` for a fixture of a wider scope than one test.

    Entered and left on loops of their own, in a thread of its own: the rig may hold processes, but nothing
    that belongs to a loop.
    """
    with ThreadPoolExecutor(1) as thread:
        thing = thread.submit(lambda: asyncio.run(_entered(rig))).result()
        try:
            yield thing
        finally:
            thread.submit(lambda: asyncio.run(_left(rig))).result()


async def _entered(rig: AbstractAsyncContextManager[_T]) -> _T:
    return await rig.__aenter__()


async def _left(rig: AbstractAsyncContextManager[_T]) -> None:
    await rig.__aexit__(None, None, None)
