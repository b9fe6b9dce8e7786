"""The one loop around a backoff: what to do again, how long to wait before, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, TypeVar

from conquiet.errors import QueueError
from conquiet.kit.clock import SYSTEM_CLOCK, Clock
from conquiet.kit.policy import Backoff

__all__ = ["Lines", "Retrying", "patiently"]

_R = TypeVar("_R")

_RETRIES: Final = 7
_BETWEEN: Final = Backoff(base=0.1, cap=3.0, kind="exponential")
_SOON: Final = Backoff(base=0.05, cap=2.0)
_MOST: Final = 64
"""Failures in a row after which the wait grows no more, whatever the backoff is."""
_QUIET: Final = 1.0
"""Seconds between two warnings, at least."""


class Lines:
    """The warnings of one consumer or worker: at most one a second, whatever goes wrong in how many places.

    With ``quiet`` a failure that goes on is told only so many seconds later. What is not told is in the log at the
    level of debugging. An error that is no ``QueueError`` is a mistake and logged with its traceback.
    """

    def __init__(self, log: logging.Logger, quiet: float = _QUIET) -> None:
        self._log = log
        self._quiet = quiet
        self._said_at = -math.inf
        self._unsaid = 0

    def warn(self, what: str, error: BaseException, *, is_new: bool = True) -> None:
        """Say what is the matter."""
        now = time.monotonic()
        if now < self._said_at + (_QUIET if is_new else self._quiet):
            self._unsaid += 1
            self._log.debug("%s: %s", what, error)
            return
        more = f" ({self._unsaid} warnings were left out)" if self._unsaid else ""
        self._said_at, self._unsaid = now, 0
        unforeseen = None if isinstance(error, QueueError) else error
        self._log.warning("%s%s: %s", what, more, error, exc_info=unforeseen)


class Retrying:
    """Failures in a row of something that is done again and again. After each the caller waits, longer each time."""

    def __init__(self, lines: Lines, clock: Clock = SYSTEM_CLOCK, backoff: Backoff = _SOON) -> None:
        self._lines = lines
        self._clock = clock
        self._backoff = backoff
        self.failures = 0
        """How often in a row it has failed."""

    def succeeded(self) -> None:
        """It worked: the next failure is the first."""
        self.failures = 0

    async def failed(self, what: str, error: BaseException, early: asyncio.Event | None = None) -> None:
        """Say ``what`` is the matter, and wait until it may be tried again; ``early`` ends the wait."""
        self._lines.warn(f"{what}, trying again", error, is_new=not self.failures)
        delay = self._backoff.delay(min(self.failures, _MOST))
        self.failures += 1
        await (self._clock.sleep(delay) if early is None else self._clock.wait(early, delay))


def _ignore(error: Exception) -> None:
    pass


async def patiently(
    clock: Clock,
    ask: Callable[[], Awaitable[_R]],
    before_retry: Callable[[Any], object] = _ignore,
    *,
    on: type[Exception] = QueueError,
    backoff: Backoff = _BETWEEN,
    retries: int | None = _RETRIES,
) -> _R:
    """What ``ask`` returns. After an error ``on`` which this is for, it is called again: up to seven times in about ten
    seconds, or as often as ``retries`` says; ``None`` is without end.

    ``before_retry`` hears of each error but the last one, and may raise it if asking again cannot help.
    """
    for retry in count():
        try:
            return await ask()
        except on as error:
            if retry == retries:
                raise
            before_retry(error)
        await clock.sleep(backoff.delay(min(retry, _MOST)))
    raise AssertionError
