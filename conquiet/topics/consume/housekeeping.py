"""What the owner of a partition does beside its messages: forward dead letters, remove what is over."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.metrics import GroupMetrics, producer_metrics
from conquiet.topics.consume.owned import Owned
from conquiet.topics.server import dead_letters, retention
from conquiet.topics.server.instance import Instance
from conquiet.wire import streams

__all__ = ["Housekeeping"]

_log = logging.getLogger("conquiet.topics")
_PAUSE: Final = 0.5
_FORWARDED: Final = 100


class Housekeeping:
    """Each owned partition's dead letters on their way at once, and its retention kept.

    Whatever goes wrong with one partition, the others are kept, and it is tried again.
    """

    def __init__(self, instance: Instance, partitions: Mapping[str, Owned], group: str) -> None:
        self._instance = instance
        self.letters = asyncio.Event()
        """To be set when dead letters wait to be forwarded."""
        self._partitions = partitions
        self._group = group
        self._background = Background()
        self._failing: set[tuple[str, str]] = set()

    @property
    def failures(self) -> int:
        """What fails for reasons that nobody foresaw, and did not succeed since."""
        return len(self._failing)

    def start(self) -> None:
        """Begin."""
        self._background.start(self._run(), "housekeeping")

    async def aclose(self) -> None:
        """End."""
        await self._background.aclose()

    async def forward(self, owned: Owned) -> None:
        """Move all dead letters of a partition from its outbox to where they are found; later if that fails."""
        await self._attempt("forward dead letters", self._forward, owned)

    async def _forward(self, owned: Owned) -> None:
        owned.outbox, is_done = False, False
        try:
            moved = _FORWARDED
            while moved >= _FORWARDED:
                moved = await dead_letters.forward(
                    self._instance, owned.partition.topic, owned.partition.index, self._group, _FORWARDED
                )
            # Another forwarder may have begun with some, and died.
            outbox = self._instance.keys.outbox(owned.stream, self._group)
            owned.outbox = bool(await self._instance.link.call(outbox, streams.xlen(outbox)))
            is_done = True
        except QueueError as error:
            _log.warning("%r: could not forward dead letters: %s", owned.stream, error)
        finally:
            owned.outbox = owned.outbox or not is_done

    async def _run(self) -> None:
        while True:
            self.letters.clear()
            for owned in list(self._partitions.values()):
                if owned.outbox and not owned.partition.is_lost:
                    await self.forward(owned)
                if self._is_to_be_trimmed(owned):
                    await self._attempt("trim", self._trim, owned)
            self._failing = {failing for failing in self._failing if failing[0] in self._partitions}
            inflight: Counter[GroupMetrics] = Counter()
            for owned in self._partitions.values():
                inflight[owned.metrics] += owned.hand.inflight
            for metrics, count in inflight.items():
                metrics.inflight(count)
            await self._instance.clock.wait(self.letters, _PAUSE)

    async def _attempt(self, what: str, work: Callable[[Owned], Coroutine[Any, Any, None]], owned: Owned) -> None:
        failing = (owned.stream, what)
        try:
            await work(owned)
        except Exception:
            if failing not in self._failing:
                _log.exception("%r: could not %s, and will try again", *failing)
            self._failing.add(failing)
        else:
            self._failing.discard(failing)

    def _is_to_be_trimmed(self, owned: Owned) -> bool:
        now = self._instance.clock.monotonic()
        return owned.partition.topic.retention.trims and now >= owned.trim_at and not owned.partition.is_lost

    async def _trim(self, owned: Owned) -> None:
        owned.trim_at = self._instance.clock.monotonic() + owned.partition.topic.retention.trim_interval
        try:
            trimmed = await retention.trim(self._instance, owned.partition.topic, owned.partition.index)
        except QueueError as error:
            _log.warning("%r: could not trim: %s", owned.stream, error)
            return
        if trimmed.dropped:
            producer_metrics(owned.partition.topic.name).dropped(owned.partition.index, trimmed.dropped)
        for group in trimmed.expired_groups:
            _log.warning("%r: group %r is idle and holds nothing back any more", owned.stream, group)
