"""What the owner of a partition does beside its messages: forward dead letters, remove what is over."""

from __future__ import annotations

import logging
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.metrics import producer_metrics
from conquiet.topics import deadletter, retention
from conquiet.topics.desk import Desk
from conquiet.topics.partition import Partition
from conquiet.topics.site import Site
from conquiet.wire import streams

__all__ = ["Housekeeping"]

_log = logging.getLogger("conquiet.topics")
_PAUSE: Final = 0.5
_FORWARDED: Final = 100


class Housekeeping:
    """Each owned partition's dead letters on their way at once, and its retention kept."""

    def __init__(self, site: Site, desk: Desk, group: str) -> None:
        self._site = site
        self._desk = desk
        self._group = group
        self._background = Background()

    def start(self) -> None:
        """Begin."""
        self._background.start(self._run(), "housekeeping")

    async def aclose(self) -> None:
        """End."""
        await self._background.aclose()

    async def forward(self, partition: Partition) -> None:
        """Move all dead letters of a partition from its outbox to where they are found."""
        partition.outbox = False
        try:
            moved = _FORWARDED
            while moved >= _FORWARDED:
                moved = await deadletter.forward(self._site, partition.topic, partition.index, self._group, _FORWARDED)
            # Another forwarder may have begun with some, and died.
            outbox = self._site.keys.outbox(partition.stream, self._group)
            partition.outbox = bool(await self._site.link.call(outbox, streams.xlen(outbox)))
        except QueueError as error:
            partition.outbox = True
            _log.warning("%r: could not forward dead letters: %s", partition.stream, error)

    async def _run(self) -> None:
        while True:
            self._desk.letters.clear()
            for partition in list(self._desk.partitions.values()):
                if partition.outbox and not partition.lease.lost:
                    await self.forward(partition)
                await self._trim(partition)
            for partition in self._desk.partitions.values():
                partition.metrics.inflight(len(partition.held) + len(partition.leaving))
            await self._site.clock.wait(self._desk.letters, _PAUSE)

    async def _trim(self, partition: Partition) -> None:
        kept, now = partition.topic.retention, self._site.clock.monotonic()
        if not kept.trims or now < partition.trim_at or partition.lease.lost:
            return
        partition.trim_at = now + kept.trim_interval
        try:
            trimmed = await retention.trim(self._site, partition.topic, partition.index)
        except QueueError as error:
            _log.warning("%r: could not trim: %s", partition.stream, error)
            return
        if trimmed.dropped:
            producer_metrics(partition.topic.name).dropped(partition.index, trimmed.dropped)
        for group in trimmed.expired_groups:
            _log.warning("%r: group %r is idle and holds nothing back any more", partition.stream, group)
