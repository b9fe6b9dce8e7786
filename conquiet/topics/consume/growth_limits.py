"""How far a group may read a topic that has grown, so that the messages of a key keep their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Growth, Topic
from conquiet.wire.scripts import Call, Script, run_everywhere

__all__ = ["HOLD", "GrowthLimits"]

HOLD: Final = 0.2
"""Seconds before a topic grows at which its groups stop taking what is new."""

_FINISHED: Final = Script.named("group_finished")
_PAGE: Final = 1000
"""Messages that wait for another attempt which one call looks at."""


class GrowthLimits:
    """What one group has finished of a topic's growth.

    A step of it is past once the group has finished every old partition up to where it ended then. Until that, old
    partitions are read up to their ends only, and those that the step has added not at all. It stays past until the
    group is set back. Where failed messages hold up no others, those that wait for another attempt hold up no step:
    all of it has begun, so whatever follows begins later.
    """

    def __init__(self, instance: Instance, group: str, *, is_strict: bool = True) -> None:
        self._instance = instance
        self._group = group
        self._is_strict = is_strict
        self._from: dict[tuple[Growth, int], str] = {}
        """For each step and old partition, the ID from which to look at what is pending; empty if it is finished."""
        self._resets: Sequence[object] = ()

    async def look(self, topic: Topic, resets: Sequence[object]) -> tuple[dict[int, str], set[int]]:
        """The ID up to which partitions may be read, for those that have a limit; and those that are closed.

        ``resets`` tells for each partition how often the group was put elsewhere there, and was read before.
        """
        if resets != self._resets:
            self.forget()
            self._resets = resets
        limits: dict[int, str] = {}
        closed: set[int] = set()
        if topic.next_count is not None and self._instance.clock.monotonic() >= topic.switch_at - HOLD:
            # Where the old partitions end is not known yet, and what comes now may be behind that.
            limits = dict.fromkeys(range(topic.partitions), "0-0")
        await self._look_at_steps(topic)
        for step in reversed(topic.growth):
            if any(self._from[step, index] for index in range(step.before)):
                limits.update(enumerate(step.ends))
                closed.update(range(step.before, step.after))
        return limits, closed

    def forget(self) -> None:
        """The group is set back, or begins again: what it has finished is not known any more."""
        self._from.clear()

    async def _look_at_steps(self, topic: Topic) -> None:
        """Ask of each step what is not known to be finished, in one write a node."""
        places = [(step, index) for step in topic.growth for index in range(step.before)]
        places = [place for place in places if self._from.setdefault(place, "-")]
        replies = await run_everywhere(self._instance.link, [self._question(topic, *place) for place in places])
        for place, reply in zip(places, replies, strict=True):
            if not reply or (isinstance(reply, bytes) and not self._is_strict):  # else it is asked as before
                self._from[place] = (reply or b"").decode()

    def _question(self, topic: Topic, step: Growth, index: int) -> tuple[str, Call]:
        stream = topic.stream(self._instance.keys, index)
        keys = [stream, self._instance.keys.retry(stream, self._group)]
        strict, start = "1" if self._is_strict else "", self._from[step, index]
        return stream, _FINISHED(keys, self._group, step.ends[index], strict, start, _PAGE)
