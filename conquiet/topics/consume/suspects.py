"""Entries that may have killed their handlers: handled one at a time, so that the culprit shows."""

from __future__ import annotations

import logging

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.desk import AFTER_ERROR, Desk
from conquiet.topics.consume.exchange import Exchanges
from conquiet.topics.consume.partition import Partition
from conquiet.topics.server.instance import Instance

__all__ = ["Suspects"]

_log = logging.getLogger("conquiet.topics")


class Suspects:
    """Lets suspects run alone among all that a consumer owns, each written down in its lease before it begins.

    If the process dies, the crash counts against that one.
    """

    def __init__(self, instance: Instance, desk: Desk, exchanges: Exchanges) -> None:
        self._instance = instance
        self._desk = desk
        self._exchanges = exchanges
        self._background = Background()
        self._current: Delivery | None = None

    def look(self, partition: Partition) -> None:
        """Let the next one run if none does; once a partition has none left, say so there."""
        current = self._current
        if current is not None and not current.settled and not current.owner.lease.lost:
            return
        self._current = None
        if current is not None and not current.owner.careful:
            current.owner.is_careful = False
            self._background.start(self._mark(current.owner, None), "suspect")
        found = next((part for part in self._desk.partitions.values() if part.careful and not part.is_draining), None)
        if found is not None:
            self._current = found.careful.popleft()
            self._background.start(self._mark(found, self._current), "suspect")

    async def aclose(self) -> None:
        """Mark no more."""
        await self._background.aclose()

    async def _mark(self, part: Partition, delivery: Delivery | None) -> None:
        """Write down which suspect is about to be handled, then let it be handled."""
        failures = 0
        while not part.lease.lost:
            try:
                await self._desk.exchange([self._exchanges.suspect(part, "" if delivery is None else delivery.id)])
                break
            except QueueError as error:
                _log.warning("%r: cannot mark a suspect: %s", part.stream, error)
                await self._instance.clock.sleep(AFTER_ERROR.delay(failures))
                failures += 1
        if delivery is None or part.lease.lost:
            self.look(part)
            if part.reader is not None:
                part.reader.wake()
        else:
            self._desk.ready.append(delivery)
            self._desk.wake_hands()
