"""Whoever pulls may wait for itself: what comes next may have to wait for what it has pulled and not settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from conquiet.kit.clock import Clock
from conquiet.topics.consume.owned import Owned

__all__ = ["Standstill"]

_log = logging.getLogger("conquiet.topics")

_LOOK: Final = 1.0
_AGAIN: Final = 60.0
"""Where several pull side by side it may be right that one waits for another: no more than a word a minute."""


class Standstill:
    """Waits for news, and says in the log, a second after the last message came, if it waits for the caller itself.

    It counts from message to message, so many short waits are like a long one.
    """

    def __init__(self, partitions: Mapping[str, Owned], most: int, clock: Clock) -> None:
        self.reason: str | None = None
        """Why nothing comes, if that was so at the last look."""
        self._partitions = partitions
        self._most = most
        self._clock = clock
        self._look_at: float | None = None
        self._say_at = 0.0

    def end(self) -> None:
        """Something came."""
        self._look_at = self.reason = None

    async def wait(self, news: asyncio.Event) -> None:
        """Return once there is news, or after a look at why there is none."""
        now = self._clock.monotonic()
        if self._look_at is None:
            self._look_at = now + _LOOK
        if not await self._clock.wait(news, max(self._look_at - now, 0.0)):
            self._look()

    def _look(self) -> None:
        now = self._clock.monotonic()
        self._look_at = now + _LOOK
        self.reason = self._find()
        if self.reason is not None and now >= self._say_at:
            self._say_at = now + _AGAIN
            _log.warning("next() waits for its own caller: %s; settle what was pulled first", self.reason)

    def _find(self) -> str | None:
        out = 0
        for owned in self._partitions.values():
            for delivery in owned.hand.started():
                out += 1
                if (behind := owned.hand.order.behind(delivery)) is not None:
                    place = f"topic {delivery.topic!r}, partition {delivery.partition}, group {delivery.group!r}"
                    return f"{place}: message {behind} waits for message {delivery.id} of the same key"
        return f"all that may be out at a time are out (max_inflight={self._most})" if out >= self._most else None
