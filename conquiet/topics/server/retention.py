"""Retention: typed calls of the script that removes what a topic need not keep."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.recent import Recent
from conquiet.topics.options import Retention
from conquiet.topics.server.group import look_at
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.scripts import Call, Script

__all__ = ["Trimmed", "Trimming", "make_room", "trim"]

_log = logging.getLogger("conquiet.topics")

_RUN: Final = 1000
"""How many entries a script looks at before others get their turn."""

_TRIM: Final = Script.named("trim")


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What was removed from one partition.

    ``dropped`` of the ``removed`` entries were not finished by some group, which only ``on_full="drop"`` allows.
    No entry before ``bound`` is left, as far as retention has ever removed any, and none from there on was removed.
    ``expired_groups`` held nothing back: no consumer has served them for ``group_expiry``.
    """

    removed: int = 0
    dropped: int = 0
    bound: str | None = None
    expired_groups: tuple[str, ...] = ()


async def trim(
    instance: Instance, topic: Topic, partition: int, retention: Retention | None = None, *, room: int = 0
) -> Trimmed:
    """Remove from a partition what ``retention``, by default the topic's own, does not keep.

    With ``room``, so many fewer are kept than ``max_len`` allows.

    Nothing that some group has not finished goes, unless ``on_full="drop"``. Safe to repeat, to stop halfway and
    to run at the same time as anything else: each run of the script computes anew how far it may go.
    """
    kept = topic.retention if retention is None else retention
    if not kept.trims and kept.group_expiry is None:
        return Trimmed()
    stream = topic.stream(instance.keys, partition)
    groups = [] if kept.group_expiry is None else sorted((await look_at(instance, stream)).groups)
    removed = dropped = 0
    while True:
        gone, lost, more, bound, *expired = await instance.run(stream, _call(instance, stream, kept, groups, room))
        removed, dropped = removed + gone, dropped + lost
        if not more:
            return Trimmed(removed, dropped, bound.decode() or None, tuple(map(_text, expired)))


async def make_room(instance: Instance, topic: Topic, partition: int, count: int) -> bool:
    """Whether ``count`` entries were refused by a partition that is not full, and may fit now.

    It is not full if only groups without consumers hold it back.
    """
    kept = topic.retention
    if kept.group_expiry is None or kept.max_len is None:
        return False
    return (await trim(instance, topic, partition, room=count)).removed > 0


class Trimming:
    """Trims each partition after ``every`` messages to it, as far as it counts ``partitions``.

    For producers to topics without consumers: else the owners of partitions trim.

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
                await trim(self._instance, topic, partition)
            except QueueError as error:  # the messages are written all the same
                _log.warning("topic %r, partition %d: could not trim: %s", topic.name, partition, error)


def _call(instance: Instance, stream: str, kept: Retention, groups: list[bytes], room: int) -> Call:
    keys = instance.keys
    return _TRIM(
        [stream, keys.trim(stream), *(keys.lease(stream, _text(group)) for group in groups)],
        instance.clock.offset_ms,
        -1 if kept.max_len is None else max(kept.max_len - room, 0),
        _ms(kept.max_age),
        "acked" if kept.delete_acked else "",
        "drop" if kept.on_full == "drop" else "",
        _ms(kept.group_expiry),
        _RUN,
        *groups,
    )


def _ms(seconds: float | None) -> int:
    return -1 if seconds is None else round(seconds * 1000)


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
