"""Groups of Spark queries: their offsets are in a checkpoint, and their progress is published for operators to see.

Such a group has a place on every partition, and neither members nor a pending list. The topic's meta says whose it is,
as the field ``group:<name>``; the lease of each partition says so too, so that no member can slip in. An adoption is
announced first, and then it looks for members; a subscriber becomes a member first, then looks at the meta, and waits
as long as the outcome is open. So one of the two finds the other, and exactly one goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from conquiet.errors import ConfigError, GroupLostError, QueueError, UnknownTopicError
from conquiet.kit import entry_ids, rules
from conquiet.kit.ids import incarnation
from conquiet.topics.server.group import live_members, name_of, on_every_partition
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.keys import name
from conquiet.wire.scripts import Script

__all__ = [
    "Position",
    "adopt_group",
    "extend_queries",
    "publish_progress",
    "refuse_spark",
    "settled",
    "spark_owned",
    "unmark",
]

_log = logging.getLogger("conquiet.topics")

_ADVICE: Final = "choose another name, or remove that group with admin.delete_group"
_GLANCE: Final = 0.05
"""Seconds between two looks at an adoption under way."""
_CLAIM_MS: Final = 10_000
"""For how long a subscriber waits for the outcome of an adoption whose author is not heard of any more."""

_CLAIM: Final = Script.named("group_claim")
_SETTLE: Final = Script.named("group_settle")
_ADOPT: Final = Script.named("group_adopt")
_RETRACT: Final = Script.named("group_retract")
_PUBLISH: Final = Script.named("group_publish")


@dataclass(frozen=True, slots=True)
class Position:
    """How far a query is on one partition: all up to the entry ``id`` is done.

    ``entries_read`` is the number of entries that were ever appended up to there, or ``None`` if that is not known:
    then the lag has to be counted.
    """

    id: str
    entries_read: int | None = None

    def __post_init__(self) -> None:
        entry_ids.checked("id", self.id)
        if self.entries_read is not None:
            rules.integer("entries_read", self.entries_read, least=0)

    @property
    def words(self) -> tuple[str, str | int]:
        """Both as scripts take them."""
        return self.id, "" if self.entries_read is None else self.entries_read


@dataclass(frozen=True, slots=True)
class _Used:
    """Why a group is not adopted on one partition."""

    stream: str
    owner: str
    consumers: int
    pending: int
    parked: int

    def __str__(self) -> str:
        counts = f"{self.consumers} consumers, {self.pending} pending entries and {self.parked} parked retries"
        lease = f", and {name_of(self.owner)!r} holds its lease" if self.owner else ""
        return f"on {self.stream!r} it has {counts}{lease}"


async def _settle(instance: Instance, topic: Topic, group: str, token: str, mark: str) -> bool:
    """End an announcement with ``"spark"``, or take it back with ``""``; whether it still counted."""
    key = instance.keys.meta(topic.name)
    return bool(await instance.run(key, _SETTLE([key], instance.clock.offset_ms, group, token, mark)))


async def _adopt(
    instance: Instance,
    stream: str,
    group: str,
    position: Position | None = None,
    action: Literal["take", "look", "extend"] = "take",
    since: int = 0,
) -> str | _Used:
    """Where the group stood on a partition, or ``""`` if it is new; or why it is not adopted."""
    keys = [instance.keys.lease(stream, group), stream, instance.keys.retry(stream, group)]
    place = ("", "") if position is None else position.words
    status, first, *rest = await instance.run(
        stream, _ADOPT(keys, instance.clock.offset_ms, group, *place, action, since)
    )
    return str(first.decode()) if status == b"OK" else _Used(stream, first.decode(), *rest)


async def unmark(instance: Instance, topic: Topic, group: str) -> None:
    """Forget in the meta whose the group was."""
    await instance.ask("HDEL", instance.keys.meta(topic.name), f"group:{group}")


# --- for the query ----------------------------------------------------------------------------------------


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
    replies = list[str | _Used]()

    async def take(partitions: range) -> None:
        streams = [(topic.stream(instance.keys, index), positions.get(index)) for index in partitions]
        replies.extend(await asyncio.gather(*(_adopt(instance, stream, group, place) for stream, place in streams)))

    await on_every_partition(registry, topic, take)
    refused = [reply for reply in replies if isinstance(reply, _Used)]
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
    keys, offset = instance.keys, instance.clock.offset_ms
    calls = [
        (stream, _PUBLISH([keys.lease(stream, group), stream], offset, group, *position.words))
        for stream, position in told
    ]
    replies = await asyncio.gather(*(instance.run(stream, call) for stream, call in calls))
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
        if not await _settle(instance, topic, group, token, "spark"):
            raise QueueError(f"group {group!r} of topic {topic.name!r} is not a Spark query's yet: it took too long")
    except BaseException:
        with suppress(QueueError):  # it counts for a while only; until then subscribers wait
            await _settle(instance, topic, group, token, "")
        raise
    registry.forget(topic.name)
    return True


async def _announce(instance: Instance, topic: Topic, group: str, token: str) -> bool:
    """Whether the group is announced as Spark's; if not, it is that already."""
    key = instance.keys.meta(topic.name)
    status = b"BUSY"
    while status == b"BUSY":
        status = await instance.run(key, _CLAIM([key], instance.clock.offset_ms, group, token, _CLAIM_MS))
        if status == b"BUSY":
            await instance.clock.sleep(_GLANCE)
    if status == b"UNKNOWN":
        raise UnknownTopicError(f"there is no topic {topic.name!r}")
    return bool(status == b"OK")


async def _refuse_used(instance: Instance, topic: Topic, group: str) -> None:
    members = await live_members(instance, topic, group)
    if members:
        names = ", ".join(sorted({name_of(member) for member in members}))
        raise _refusal(topic, group, f"it has live members: {names}")
    for reply in await asyncio.gather(
        *(_adopt(instance, one, group, None, "look") for one in topic.streams(instance.keys))
    ):
        if isinstance(reply, _Used):
            raise _refusal(topic, group, str(reply))


def _refusal(topic: Topic, group: str, reason: str) -> ConfigError:
    what = f"group {group!r} of topic {topic.name!r} cannot become a Spark query's"
    return ConfigError(f"{what}: {reason}; {_ADVICE}")


async def _take_back(
    instance: Instance, registry: Registry, topic: Topic, group: str, replies: Iterable[str | _Used]
) -> None:
    """Put back what was taken, after a foreign reader has begun to consume in the middle of it."""
    for partition, stood in enumerate(replies):
        if isinstance(stood, str):
            stream = topic.stream(instance.keys, partition)
            await instance.run(stream, _RETRACT([instance.keys.lease(stream, group), stream], group, stood))
    await unmark(instance, topic, group)
    registry.forget(topic.name)


# --- for growth and subscribers ---------------------------------------------------------------------------


async def extend_queries(instance: Instance, topic: Topic, announced_ms: int) -> None:
    """Put all groups of Spark queries on the partitions that ``topic`` is about to get."""
    for partition in range(topic.partitions, topic.span):
        for group in sorted(topic.spark_groups):
            reply = await _adopt(instance, topic.stream(instance.keys, partition), group, None, "extend", announced_ms)
            if isinstance(reply, _Used):
                _log.warning("group %r is a Spark query's, but %s", group, reply)


async def settled(instance: Instance, registry: Registry, topic: Topic, group: str) -> Topic:
    """The topic once no adoption of ``group`` is under way."""
    while group in topic.claimed_groups:
        await instance.clock.sleep(_GLANCE)
        topic = await registry.existing(topic.name)
    return topic


def refuse_spark(topic: Topic, group: str) -> None:
    """``ConfigError`` if ``group`` is a Spark query's."""
    if group in topic.spark_groups:
        raise spark_owned(topic, group)


def spark_owned(topic: Topic, group: str) -> ConfigError:
    """The error of a subscription to a Spark query's group."""
    what = f"group {group!r} of topic {topic.name!r} is a Spark query's, and nobody can subscribe to it"
    return ConfigError(f"{what}: {_ADVICE}")
