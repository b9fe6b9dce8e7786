"""How far a group may read a topic that has grown, so that the messages of a key keep their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Growth, Topic
from conquiet.wire import streams
from conquiet.wire.streams import pack

__all__ = ["HOLD", "Gate"]

HOLD: Final = 0.2
"""Seconds before a topic grows at which its groups stop taking what is new."""


class Gate:
    """What one group has finished of a topic's growth.

    A step of it is past once the group has finished every old partition up to where it ended then. Until that, old
    partitions are read up to their ends only, and those that the step has added not at all. It stays past until the
    group is set back.
    """

    def __init__(self, instance: Instance, group: str) -> None:
        self._instance = instance
        self._group = group
        self._past: set[Growth] = set()
        self._resets: Sequence[object] = ()

    async def look(self, topic: Topic, resets: Sequence[object]) -> tuple[dict[int, str], set[int]]:
        """The ID up to which partitions may be read, for those that have a limit; and those that are closed.

        ``resets`` tells for each partition how often the group was put elsewhere there, and was read before.
        """
        if resets != self._resets:
            self._past.clear()
            self._resets = resets
        limits: dict[int, str] = {}
        closed: set[int] = set()
        if topic.next_count is not None and self._instance.clock.monotonic() >= topic.switch_at - HOLD:
            # Where the old partitions end is not known yet, and what comes now may be behind that.
            limits = dict.fromkeys(range(topic.partitions), "0-0")
        for step in reversed(await self._steps(topic)):
            limits.update(enumerate(step.ends))
            closed.update(range(step.before, step.after))
        return limits, closed

    def forget(self) -> None:
        """The group is gone, and will begin again: what it has finished is not known any more."""
        self._past.clear()

    async def _steps(self, topic: Topic) -> list[Growth]:
        """The steps that are not past."""
        for step in topic.growth:
            if step not in self._past and await self._is_past(topic, step):
                self._past.add(step)
        return [step for step in topic.growth if step not in self._past]

    async def _is_past(self, topic: Topic, step: Growth) -> bool:
        for index, end in enumerate(step.ends):
            if not await self._has_finished(topic.stream(self._instance.keys, index), end):
                return False
        return True

    async def _has_finished(self, stream: str, end: str) -> bool:
        """Whether nothing up to ``end`` is pending or was not delivered."""
        link = self._instance.link
        commands = (streams.xinfo_groups(stream), pack("XPENDING", stream, self._group, "-", end, 1))
        groups, pending = await link.call_many(stream, commands)
        row = None if isinstance(groups, Exception) else streams.group_named(groups, self._group)
        if row is None or pending or isinstance(pending, Exception):
            return False
        after = f"({row['last-delivered-id'].decode()}"
        return not await link.call(stream, pack("XRANGE", stream, after, end, "COUNT", 1))
