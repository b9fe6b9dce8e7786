"""More partitions for a topic, such that the messages of a key keep their order.

Growth is announced first. When every producer has heard of it, all of them hold back for a moment: nothing is on its
way any more when the last ID of each old partition is noted, and only then do they go on, with the new partitions.
So whatever a key got before lies in the old partitions up to those IDs, and whatever it got after lies behind them or
in a new partition; a consumer that keeps the order finishes the former everywhere before it begins with the latter.

All groups are on a new partition before it can be written to: until then retention would not know of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.kit import codec, rules
from conquiet.topics.server.external_groups import extend_queries
from conquiet.topics.server.group import call_members, extend_groups, look_at_all
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import FRESH, Registry, Topic
from conquiet.wire.keys import name
from conquiet.wire.scripts import Script

__all__ = ["OVERDUE", "announce", "call_members", "finish_growth", "grow"]

OVERDUE: Final = 3.0
"""Seconds after its time from which any client completes a growth: its author is not heard of any more."""

_LEAD: Final = FRESH + 0.5
_SETTLE: Final = 0.5
"""Seconds for a write that was on its way when the producers began to hold back."""

_PLAN: Final = Script.named("grow_plan")
_COMMIT: Final = Script.named("grow_commit")


async def grow(instance: Instance, registry: Registry, topic: str, partitions: int) -> None:
    """Give ``topic`` as many partitions, more than it has; takes about two seconds.

    Safe to repeat: a growth to the same number that was begun and not completed is completed.
    """
    rules.integer("partitions", partitions, least=1)
    key = instance.keys.meta(name("topic", topic))
    lead = round(_LEAD * 1000)
    status, *rest = await instance.run(key, _PLAN([key], instance.clock.offset_ms, partitions, lead))
    if status == b"UNKNOWN":
        raise UnknownTopicError(f"there is no topic {topic!r} that could grow")
    if status == b"LESS":
        raise ConfigError(f"partitions must be more than the {int(rest[0])} that {topic!r} has, not {partitions}")
    if status == b"BUSY":
        raise ConfigError(
            f"topic {topic!r} is growing to {int(rest[0])} partitions, and cannot to {partitions} meanwhile"
        )
    await _call_all(instance, topic)
    found = await registry.fetch_or_none(topic)
    if found is not None:
        await finish_growth(instance, registry, found)


async def finish_growth(instance: Instance, registry: Registry, topic: Topic) -> None:
    """Complete the growth that ``topic`` has planned once it has taken effect; harmless if another client does."""
    if topic.next_count is None:
        return
    await instance.clock.sleep(max(topic.switch_at + _SETTLE - instance.clock.monotonic(), 0.0))
    looks = await look_at_all(instance, topic)
    found = await registry.fetch_or_none(topic.name)
    if found is None or (found.partitions, found.next_count) != (topic.partitions, topic.next_count):
        registry.forget(topic.name)  # another client has completed it, or the topic is gone
        return
    announced_ms = found.switch_ms - round(_LEAD * 1000)
    await extend_groups(instance, found, looks, announced_ms)
    await extend_queries(instance, found, announced_ms)
    ends = [look.end for look in looks]
    step = codec.encode({"before": topic.partitions, "after": topic.next_count, "ends": ends})
    key = instance.keys.meta(topic.name)
    committed = await instance.run(
        key, _COMMIT([key], instance.clock.offset_ms, topic.partitions, topic.next_count, step)
    )
    registry.forget(topic.name)
    if committed:  # else another client has completed it, or the topic is gone
        await registry.enlist(replace(found, partitions=topic.next_count))
    await _call_all(instance, topic.name)


async def announce(instance: Instance, registry: Registry, topic: Topic) -> None:
    """List the partitions of a topic that has grown, and tell its members; what follows each growth."""
    await registry.enlist(topic)
    await _call_all(instance, topic.name)


async def _call_all(instance: Instance, topic: str) -> None:
    for group in await instance.ask("SMEMBERS", instance.keys.groups(topic)):
        await call_members(instance, topic, group.decode())
