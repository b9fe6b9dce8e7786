"""Groups of Spark queries: their offsets are in a checkpoint, and what is done is published for operators to see.

Such a group has a place on every partition, and neither members nor a pending list. The topic's meta says whose it is,
as the field ``group:<name>``; so that no member can slip in, the lease of each partition says so too. To make a group
Spark's is announced first and looked into then, while a subscriber becomes a member first and looks at the meta then,
and waits as long as the outcome is open. So one of both finds the other, and exactly one goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from conquiet.errors import ConfigError, GroupLostError, QueueError, UnknownTopicError
from conquiet.kit import rules
from conquiet.kit.ids import incarnation
from conquiet.topics.format.entry_ids import entry_id
from conquiet.topics.operate.inspect import live_members
from conquiet.topics.server.instance import Site
from conquiet.topics.server.presence import on_every_partition
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.keys import name
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script
from conquiet.wire.streams import pack

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

_CLAIM_MS: Final = 10_000
"""For how long a subscriber waits for the outcome of an adoption whose author is not heard of any more."""
_GLANCE: Final = 0.05

_CLAIM: Final = Script.named("group_claim")
_SETTLE: Final = Script.named("group_settle")
_ADOPT: Final = Script.named("group_adopt")
_RETRACT: Final = Script.named("group_retract")
_PUBLISH: Final = Script.named("group_publish")

_ADVICE: Final = "choose another name, or remove that group with admin.delete_group"


@dataclass(frozen=True, slots=True)
class Position:
    """How far a query is on one partition: all up to the entry ``id`` is done.

    ``entries_read`` is the number of entries that were ever appended up to there, or ``None`` if that is not known:
    then whoever asks for the lag has to count.
    """

    id: str
    entries_read: int | None = None

    def __post_init__(self) -> None:
        entry_id("id", self.id)
        if self.entries_read is not None:
            rules.integer("entries_read", self.entries_read, least=0)


# --- for the query ----------------------------------------------------------------------------------------


async def adopt_group(
    site: Site, registry: Registry, topic: Topic, group: str, positions: Mapping[int, Position]
) -> None:
    """Make ``group`` a Spark query's, on every partition, and put it where the query is.

    Where ``positions`` has nothing of a partition, a new group begins at the beginning and one that is there stays.
    A group that nobody consumes with can be taken as well as a new name; with live members, consumers, pending
    entries or parked retries it is refused with a ``ConfigError``, and nothing has changed. Safe to repeat: after a
    failure, when a query starts again, and after growth.
    """
    name("group", group)
    _check(topic, positions)
    is_new = await _mark(site, registry, topic, group)
    replies = list[str | _Used]()

    async def take(partitions: range) -> None:
        work = (_adopt(site, topic, partition, group, positions.get(partition)) for partition in partitions)
        replies.extend(await asyncio.gather(*work))

    await on_every_partition(registry, topic, take)
    refused = [reply for reply in replies if isinstance(reply, _Used)]
    if refused:
        if is_new:
            await _take_back(site, registry, topic, group, replies)
        raise _refusal(topic, group, str(refused[0]))
    groups = site.keys.groups(topic.name)
    # Asked first: a server whose memory is full refuses to list again what is listed.
    if not await site.link.call(groups, pack("SISMEMBER", groups, group)):
        await site.link.call(groups, pack("SADD", groups, group))


async def publish_progress(site: Site, topic: Topic, group: str, positions: Mapping[int, Position]) -> None:
    """Tell how far the query of ``group`` is; what was told last counts, also if it is further back.

    Counts as being served, also where nothing has moved. ``GroupLostError`` if the group was deleted, or is no Spark
    query's; ``ConfigError`` if somebody consumes with it. The other partitions are told nevertheless.
    """
    _check(topic, positions)
    told = [(topic.stream(site.keys, partition), position) for partition, position in positions.items()]
    replies = await asyncio.gather(*(_publish(site, stream, group, position) for stream, position in told))
    for (stream, _), reply in zip(told, replies, strict=True):
        if reply == b"LOST":
            raise GroupLostError(f"group {group!r} is gone from {stream!r}, or is no Spark query's any more")
        if reply == b"BUSY":
            what = "somebody consumes with it; remove that consumer with XGROUP DELCONSUMER"
            raise ConfigError(f"group {group!r} on {stream!r} is a Spark query's and cannot be moved: {what}")


async def _publish(site: Site, stream: str, group: str, position: Position) -> Reply:
    keys = [site.keys.lease(stream, group), stream]
    return await site.run(stream, _PUBLISH(keys, site.clock.offset_ms, group, position.id, _entries(position)))


def _check(topic: Topic, positions: Mapping[int, Position]) -> None:
    if topic.legacy:
        raise ConfigError(f"{topic.name!r} is a legacy stream, where nothing tells a Spark query's group from others")
    for partition in positions:
        if not 0 <= partition < topic.partitions:
            raise ConfigError(
                f"a partition of {topic.name!r} must be from 0 to {topic.partitions - 1}, not {partition!r}"
            )


# --- whose it is ------------------------------------------------------------------------------------------


async def _mark(site: Site, registry: Registry, topic: Topic, group: str) -> bool:
    """Mark the group as Spark's unless somebody consumes with it; whether it was not before."""
    token = incarnation()
    if not await _announce(site, topic, group, token):
        return False
    try:
        await _refuse_used(site, topic, group)
        if not await _settle(site, topic, group, token, "spark"):
            raise QueueError(f"group {group!r} of topic {topic.name!r} is not a Spark query's yet: it took too long")
    except BaseException:
        with suppress(QueueError):  # it counts for a while only; until then subscribers wait
            await _settle(site, topic, group, token, "")
        raise
    registry.forget(topic.name)
    return True


async def _announce(site: Site, topic: Topic, group: str, token: str) -> bool:
    """Whether the group is announced as Spark's; if not, it is that already."""
    key = site.keys.meta(topic.name)
    while True:
        status = await site.run(key, _CLAIM([key], site.clock.offset_ms, group, token, _CLAIM_MS))
        if status == b"UNKNOWN":
            raise UnknownTopicError(f"there is no topic {topic.name!r}")
        if status != b"BUSY":
            return bool(status == b"OK")
        await site.clock.sleep(_GLANCE)


async def _settle(site: Site, topic: Topic, group: str, token: str, mark: str) -> bool:
    key = site.keys.meta(topic.name)
    return bool(await site.run(key, _SETTLE([key], site.clock.offset_ms, group, token, mark)))


async def _refuse_used(site: Site, topic: Topic, group: str) -> None:
    members = await live_members(site, topic, group)
    if members:
        names = ", ".join(sorted({member.partition("#")[0] for member in members}))
        raise _refusal(topic, group, f"it has live members: {names}")
    looks = (_adopt(site, topic, partition, group, None, "look") for partition in range(topic.partitions))
    for reply in await asyncio.gather(*looks):
        if isinstance(reply, _Used):
            raise _refusal(topic, group, str(reply))


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
        lease = f", and {self.owner.partition('#')[0]!r} holds its lease" if self.owner else ""
        return f"on {self.stream!r} it has {counts}{lease}"


async def _adopt(
    site: Site,
    topic: Topic,
    partition: int,
    group: str,
    position: Position | None,
    action: str = "take",
    since: int = 0,
) -> str | _Used:
    """Where the group stood on a partition, or nowhere if it is new; or why it is not adopted."""
    stream = topic.stream(site.keys, partition)
    keys = [site.keys.lease(stream, group), stream, site.keys.retry(stream, group)]
    id = "" if position is None else position.id
    call = _ADOPT(keys, site.clock.offset_ms, group, id, _entries(position), action, since)
    status, first, *rest = await site.run(stream, call)
    return str(first.decode()) if status == b"OK" else _Used(stream, first.decode(), *rest)


def _entries(position: Position | None) -> str | int:
    return "" if position is None or position.entries_read is None else position.entries_read


def _refusal(topic: Topic, group: str, reason: str) -> ConfigError:
    what = f"group {group!r} of topic {topic.name!r} cannot become a Spark query's"
    return ConfigError(f"{what}: {reason}; {_ADVICE}")


async def _take_back(site: Site, registry: Registry, topic: Topic, group: str, replies: Iterable[str | _Used]) -> None:
    """Put back what was taken, after somebody who is no member has begun to consume in the middle of it."""
    for partition, before in enumerate(replies):
        stream = topic.stream(site.keys, partition)
        if isinstance(before, str):
            await site.run(stream, _RETRACT([site.keys.lease(stream, group), stream], group, before))
    await unmark(site, topic, group)
    registry.forget(topic.name)


async def unmark(site: Site, topic: Topic, group: str) -> None:
    """Forget in the meta whose the group was."""
    key = site.keys.meta(topic.name)
    await site.link.call(key, pack("HDEL", key, f"group:{group}"))


async def extend_queries(site: Site, topic: Topic, announced_ms: int) -> None:
    """Put all groups of Spark queries on the partitions that ``topic`` is about to get."""
    for partition in range(topic.partitions, topic.span):
        for group in sorted(topic.spark_groups):
            reply = await _adopt(site, topic, partition, group, None, "extend", announced_ms)
            if isinstance(reply, _Used):
                _log.warning("group %r is a Spark query's, but %s", group, reply)


# --- for subscribers --------------------------------------------------------------------------------------


async def settled(site: Site, registry: Registry, topic: Topic, group: str) -> Topic:
    """The topic once nobody is about to make ``group`` a Spark query's."""
    while group in topic.claimed_groups:
        await site.clock.sleep(_GLANCE)
        found = await registry.look_up(topic.name)
        if found is None:
            raise UnknownTopicError(f"topic {topic.name!r} was deleted")
        topic = found
    return topic


def refuse_spark(topic: Topic, group: str) -> None:
    """``ConfigError`` if ``group`` is a Spark query's."""
    if group in topic.spark_groups:
        raise spark_owned(topic, group)


def spark_owned(topic: Topic, group: str) -> ConfigError:
    """What somebody is told who wants to subscribe to a Spark query's group."""
    what = f"group {group!r} of topic {topic.name!r} is a Spark query's, and nobody can subscribe to it"
    return ConfigError(f"{what}: {_ADVICE}")
