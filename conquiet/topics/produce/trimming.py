"""Trimming by producers, for topics without consumers: else the owners of partitions trim."""

from __future__ import annotations

import logging
import random

from conquiet.errors import QueueError
from conquiet.kit.recent import Recent
from conquiet.topics.server import retention
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic

__all__ = ["Trimming"]

_log = logging.getLogger("conquiet.topics")


class Trimming:
    """Trims each partition after ``every`` messages to it, as far as it counts ``partitions``.

    A count that may get lost begins anywhere, so that many writers together trim as often as one: where there are more
    partitions than are counted, or with ``chance``, which is for writers of a few messages each.
    """

    def __init__(self, instance: Instance, every: int, partitions: int, chance: random.Random | None = None) -> None:
        self._instance = instance
        self._every = every
        self._chance = chance
        self._sent = Recent[tuple[str, int], int](partitions)

    async def wrote(self, topic: Topic, partition: int, count: int) -> None:
        """Count messages that were appended, and trim if it is time. A failure to trim is logged, not raised."""
        at = (topic.name, partition)
        before = self._sent.get(at)
        if before is None:
            is_anywhere = self._chance is not None or self._sent.is_full
            before = self._sent.keep(at, (self._chance or random).randrange(self._every) if is_anywhere else 0)
        self._sent[at] = (before + count) % self._every
        if before + count >= self._every:
            try:
                await retention.trim(self._instance, topic, partition)
            except QueueError as error:  # the messages are written all the same
                _log.warning("topic %r, partition %d: could not trim: %s", topic.name, partition, error)
