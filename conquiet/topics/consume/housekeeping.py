"""What the owner of a partition does beside its messages: forward dead letters, remove what is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.metrics import producer_metrics
from conquiet.topics.consume.desk import Desk
from conquiet.topics.consume.partition import Partition
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

    def __init__(self, instance: Instance, desk: Desk, group: str) -> None:
        self._instance = instance
        self._desk = desk
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

    async def forward(self, partition: Partition) -> None:
        """Move all dead letters of a partition from its outbox to where they are found; later if that fails."""
        await self._attempt("forward dead letters", self._forward, partition)

    async def _forward(self, partition: Partition) -> None:
        partition.outbox, is_done = False, False
        try:
            moved = _FORWARDED
            while moved >= _FORWARDED:
                moved = await dead_letters.forward(
                    self._instance, partition.topic, partition.index, self._group, _FORWARDED
                )
            # Another forwarder may have begun with some, and died.
            outbox = self._instance.keys.outbox(partition.stream, self._group)
            partition.outbox = bool(await self._instance.link.call(outbox, streams.xlen(outbox)))
            is_done = True
        except QueueError as error:
            _log.warning("%r: could not forward dead letters: %s", partition.stream, error)
        finally:
            partition.outbox = partition.outbox or not is_done

    async def _run(self) -> None:
        while True:
            self._desk.letters.clear()
            for partition in list(self._desk.partitions.values()):
                if partition.outbox and not partition.lease.lost:
                    await self.forward(partition)
                if self._is_to_be_trimmed(partition):
                    await self._attempt("trim", self._trim, partition)
            self._failing = {failing for failing in self._failing if failing[0] in self._desk.partitions}
            for partition in self._desk.partitions.values():
                partition.metrics.inflight(len(partition.held) + len(partition.leaving))
            await self._instance.clock.wait(self._desk.letters, _PAUSE)

    async def _attempt(
        self, what: str, work: Callable[[Partition], Coroutine[Any, Any, None]], partition: Partition
    ) -> None:
        failing = (partition.stream, what)
        try:
            await work(partition)
        except Exception:
            if failing not in self._failing:
                _log.exception("%r: could not %s, and will try again", *failing)
            self._failing.add(failing)
        else:
            self._failing.discard(failing)

    def _is_to_be_trimmed(self, partition: Partition) -> bool:
        now = self._instance.clock.monotonic()
        return partition.topic.retention.trims and now >= partition.trim_at and not partition.lease.lost

    async def _trim(self, partition: Partition) -> None:
        partition.trim_at = self._instance.clock.monotonic() + partition.topic.retention.trim_interval
        try:
            trimmed = await retention.trim(self._instance, partition.topic, partition.index)
        except QueueError as error:
            _log.warning("%r: could not trim: %s", partition.stream, error)
            return
        if trimmed.dropped:
            producer_metrics(partition.topic.name).dropped(partition.index, trimmed.dropped)
        for group in trimmed.expired_groups:
            _log.warning("%r: group %r is idle and holds nothing back any more", partition.stream, group)
