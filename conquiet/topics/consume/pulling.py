"""The place of handlers where the user pulls."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from conquiet.kit.clock import Clock
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.owned import Owned

__all__ = ["Pulling"]

_log = logging.getLogger("conquiet.topics")

_LOOK: Final = 1.0
_AGAIN: Final = 60.0
"""Where several pull side by side it may be right that one waits for another: no more than a word a minute."""


class Pulling:
    """Deliveries wait here until they are asked for. Closing does not wait for pulled messages.

    Whoever pulls may wait for itself: what comes next may have to wait for what it has pulled and not settled. That is
    said in the log a second after the last message came, counted from message to message: many short waits are like a
    long one.
    """

    finishes = False
    has_ready = False
    """Nobody need wait for the caller to come."""
    in_threads: frozenset[Owned] = frozenset()

    def __init__(self, partitions: Mapping[str, Owned], most: int, clock: Clock) -> None:
        self.reason: str | None = None
        """Why nothing comes, if that was so at the last look."""
        self._partitions = partitions
        self._most = most
        self._clock = clock
        self._ready: deque[Delivery] = deque()
        self._news = asyncio.Event()
        self._look_at: float | None = None
        self._say_at = 0.0

    def begin(self, owner: Owned, deliveries: Iterable[Delivery]) -> None:
        """Keep these until they are asked for."""
        self._ready.extend(deliveries)
        self._news.set()

    def wake(self) -> None:
        """There may be an end."""
        self._news.set()

    async def next(self, ending: asyncio.Event) -> Delivery | None:
        """The next delivery, waiting for one; ``None`` once ``ending`` is set."""
        while not ending.is_set():
            while self._ready:
                delivery = self._ready.popleft()
                if delivery.owner.hand.begin(delivery, self._clock.monotonic()):
                    self._look_at = self.reason = None
                    return delivery
            self._news.clear()
            await self._wait()
        return None

    async def aclose(self) -> None:
        """Nothing runs here; whoever waits is told."""
        self._look_at = self.reason = None
        self._news.set()

    async def _wait(self) -> None:
        """Return once there is news, or after a look at why there is none."""
        now = self._clock.monotonic()
        if self._look_at is None:
            self._look_at = now + _LOOK
        if await self._clock.wait(self._news, max(self._look_at - now, 0.0)):
            return
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
