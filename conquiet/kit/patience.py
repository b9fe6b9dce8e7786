"""Asking again, where that does no harm, while a server is away for a moment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from conquiet.errors import QueueError
from conquiet.kit.clock import Clock
from conquiet.kit.policy import Backoff

__all__ = ["patiently"]

_R = TypeVar("_R")

_RETRIES: Final = 7
_BETWEEN: Final = Backoff(base=0.1, cap=3.0, kind="exponential")


def _ignore(error: QueueError) -> None:
    pass


async def patiently(
    clock: Clock, ask: Callable[[], Awaitable[_R]], before_retry: Callable[[QueueError], object] = _ignore
) -> _R:
    """What ``ask`` returns. After a ``QueueError`` it is called again, up to seven times in about ten seconds.

    ``before_retry`` hears of each error but the last one, and may raise it if asking again cannot help.
    """
    for retry in range(_RETRIES):
        try:
            return await ask()
        except QueueError as error:
            before_retry(error)
        await clock.sleep(_BETWEEN.delay(retry))
    return await ask()
