"""Groups of Spark queries: their offsets are in a checkpoint, and their progress is published for operators to see.

An adoption is announced first, and then it looks for members; a subscriber becomes a member first, then looks at the
meta, and waits as long as the outcome is open. So one of the two finds the other, and exactly one goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from conquiet.errors import ConfigError, GroupLostError, QueueError, UnknownTopicError
from conquiet.kit.ids import incarnation
from conquiet.topics.server.external_groups import (
    ADVICE,
    GLANCE,
    Position,
    Used,
    adopt,
    claim,
    publish,
    retract,
    settle,
    unmark,
)
from conquiet.topics.server.group import live_members, on_every_partition
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.keys import name

__all__ = ["Position", "adopt_group", "publish_progress"]


async def adopt_group(
    instance: Instance, registry: Registry, topic: Topic, group: str, positions: Mapping[int, Position]
) -> None:
    """Make ``group`` a Spark query's, on every partition, and put it where the query is.

    Where ``positions`` has nothing of a partition, a new group begins at the beginning and one that is there stays.
    A group without consumers can be taken as well as a new name; one with live members, consumers, pending entries or
    parked retries is refused with a ``ConfigError``, and nothing has changed. Safe to repeat: after a failure, when a
    query starts again, and after growth.
    """
    name("group", group)
    _check(topic, positions)
    is_new = await _mark(instance, registry, topic, group)
    replies = list[str | Used]()

    async def take(partitions: range) -> None:
        streams = [(topic.stream(instance.keys, index), positions.get(index)) for index in partitions]
        replies.extend(await asyncio.gather(*(adopt(instance, stream, group, place) for stream, place in streams)))

    await on_every_partition(registry, topic, take)
    refused = [reply for reply in replies if isinstance(reply, Used)]
    if refused:
        if is_new:
            await _take_back(instance, registry, topic, group, replies)
        raise _refusal(topic, group, str(refused[0]))
    await instance.enlist(instance.keys.groups(topic.name), group)


async def publish_progress(instance: Instance, topic: Topic, group: str, positions: Mapping[int, Position]) -> None:
    """Tell how far the query of ``group`` is; what was told last counts, also if it is further back.

    Counts as being served, also where nothing has moved. ``GroupLostError`` if the group was deleted, or is no Spark
    query's; ``ConfigError`` if a consumer uses it. The other partitions are told nevertheless.
    """
    _check(topic, positions)
    told = [(topic.stream(instance.keys, partition), position) for partition, position in positions.items()]
    replies = await asyncio.gather(*(publish(instance, stream, group, position) for stream, position in told))
    for (stream, _), reply in zip(told, replies, strict=True):
        if reply == b"LOST":
            raise GroupLostError(f"group {group!r} is gone from {stream!r}, or is no Spark query's any more")
        if reply == b"BUSY":
            what = "somebody consumes with it; remove that consumer with XGROUP DELCONSUMER"
            raise ConfigError(f"group {group!r} on {stream!r} is a Spark query's and cannot be moved: {what}")


def _check(topic: Topic, positions: Mapping[int, Position]) -> None:
    if topic.legacy:
        raise ConfigError(f"{topic.name!r} is a legacy stream, where nothing tells a Spark query's group from others")
    for partition in positions:
        topic.check_partition(partition)


async def _mark(instance: Instance, registry: Registry, topic: Topic, group: str) -> bool:
    """Mark the group as Spark's unless consumers use it; whether it was not before."""
    token = incarnation()
    if not await _announce(instance, topic, group, token):
        return False
    try:
        await _refuse_used(instance, topic, group)
        if not await settle(instance, topic, group, token, "spark"):
            raise QueueError(f"group {group!r} of topic {topic.name!r} is not a Spark query's yet: it took too long")
    except BaseException:
        with suppress(QueueError):  # it counts for a while only; until then subscribers wait
            await settle(instance, topic, group, token, "")
        raise
    registry.forget(topic.name)
    return True


async def _announce(instance: Instance, topic: Topic, group: str, token: str) -> bool:
    """Whether the group is announced as Spark's; if not, it is that already."""
    while (status := await claim(instance, topic, group, token)) == b"BUSY":
        await instance.clock.sleep(GLANCE)
    if status == b"UNKNOWN":
        raise UnknownTopicError(f"there is no topic {topic.name!r}")
    return bool(status == b"OK")


async def _refuse_used(instance: Instance, topic: Topic, group: str) -> None:
    members = await live_members(instance, topic, group)
    if members:
        names = ", ".join(sorted({member.partition("#")[0] for member in members}))
        raise _refusal(topic, group, f"it has live members: {names}")
    for reply in await asyncio.gather(
        *(adopt(instance, one, group, None, "look") for one in topic.streams(instance.keys))
    ):
        if isinstance(reply, Used):
            raise _refusal(topic, group, str(reply))


def _refusal(topic: Topic, group: str, reason: str) -> ConfigError:
    what = f"group {group!r} of topic {topic.name!r} cannot become a Spark query's"
    return ConfigError(f"{what}: {reason}; {ADVICE}")


async def _take_back(
    instance: Instance, registry: Registry, topic: Topic, group: str, replies: Iterable[str | Used]
) -> None:
    """Put back what was taken, after a foreign reader has begun to consume in the middle of it."""
    for partition, stood in enumerate(replies):
        if isinstance(stood, str):
            await retract(instance, topic.stream(instance.keys, partition), group, stood)
    await unmark(instance, topic, group)
    registry.forget(topic.name)
