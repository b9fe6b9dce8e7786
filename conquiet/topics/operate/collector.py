"""What only Redis knows of topics and groups, collected at each scrape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from conquiet.kit.loopthread import result_from_private_loop
from conquiet.metrics import GroupGauges, GroupPartitionGauges, PartitionGauges, TopicsCollector
from conquiet.topics.operate import inspect
from conquiet.topics.operate.inspect import Counting
from conquiet.topics.server.group import group_names
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.connections import Connections

__all__ = ["Collector"]

_Rows: TypeAlias = list[PartitionGauges | GroupPartitionGauges | GroupGauges]
_PATIENCE: Final = 5.0
_COUNTED: Final = 200_000
"""Entries that one reading counts at most, more or less, where the server does not know a lag."""
_LEAST: Final = 1_000
"""Entries that it may count on each partition for each group all the same."""


class Collector(TopicsCollector):
    """Shows lengths, backlogs and ownership at each scrape, until ``close``; over connections of its own.

    One reading looks at no more than ``most_partitions`` partitions, each counted once for itself and once for each
    of its groups, and gives up after a few seconds: a scrape must not be the heaviest thing that a server does. For
    the same reason a long backlog is not counted to its end, where counting is needed: it is shown too low.
    """

    def __init__(self, instance: Instance, topics: Sequence[str] | None, most_partitions: int) -> None:
        self._instance = Instance(Connections(instance.link.address), instance.keys, instance.clock)
        self._registry = Registry(self._instance)
        self._topics = topics
        self._left = self._limit = most_partitions
        self._countable = _COUNTED
        super().__init__(lambda: result_from_private_loop(self._read(), _PATIENCE))

    def close(self) -> None:
        """Show nothing more, and close the connections. May be called again."""
        super().close()
        result_from_private_loop(self._instance.link.aclose(), _PATIENCE)

    async def _read(self) -> _Rows:
        self._left, self._countable = self._limit, _COUNTED
        rows: _Rows = []
        for name in self._topics if self._topics is not None else await self._registry.names():
            topic = await self._registry.fetch_or_none(name)
            if topic is not None and self._may_look(topic):
                rows += await self._read_topic(topic)
        return rows

    def _may_look(self, topic: Topic) -> bool:
        self._left -= topic.partitions
        return self._left >= 0

    async def _read_topic(self, topic: Topic) -> _Rows:
        info = await inspect.describe_topic(self._instance, topic)
        rows: _Rows = [PartitionGauges(topic.name, part.index, part.length) for part in info.by_partition]
        for group in await group_names(self._instance, topic):
            if self._may_look(topic):
                rows += await self._read_group(topic, group)
        return rows

    async def _read_group(self, topic: Topic, group: str) -> _Rows:
        # Half of what is left for each group: the last one has something too.
        counting = Counting(max(self._countable // (4 * topic.partitions), _LEAST))
        info = await inspect.describe_group(self._instance, topic, group, counting)
        self._countable -= counting.done
        return [
            GroupGauges(topic.name, group, len(info.unowned)),
            *(
                GroupPartitionGauges(
                    topic.name, group, part.index, part.pending, part.lag, part.retry_depth, part.oldest_pending_age
                )
                for part in info.partitions
            ),
        ]
