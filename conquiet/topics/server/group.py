"""Groups on the partitions of a topic: typed calls of the scripts that look at them, and how a group gets everywhere.

Retention keeps what the groups of a partition have not finished; it knows nothing of a group that is not there. So no
partition is written to before every group of the topic is on it. Two rules ensure that, whatever happens at the same
time. A growth announces its partitions first, and then asks which groups there are. A change of a group goes over all
partitions first, and then asks whether more are announced. So one of the two finds the other.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from conquiet.errors import ConfigError
from conquiet.kit import codec
from conquiet.kit.chunks import by_number
from conquiet.kit.entry_ids import BEGINNING, moment
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.capabilities import is_no_stream
from conquiet.wire.groups import create_group, is_group_there
from conquiet.wire.scripts import Script, run_everywhere

__all__ = [
    "GroupLook",
    "MemberInfo",
    "PartitionInfo",
    "PartitionLook",
    "call_members",
    "count_after",
    "existing_group",
    "extend_groups",
    "found_group",
    "group_names",
    "live_members",
    "look_at",
    "look_at_all",
    "look_at_group",
    "members_of",
    "name_of",
    "on_every_partition",
]

_log = logging.getLogger("conquiet.topics")

_PAGE: Final = 500
"""Groups that one call puts on a partition."""
_COUNTED: Final = 2_000
"""Entries that one call counts, before other clients get their turn at the server."""
_TTL_MS: Final = 15_000
"""How long a member that does not say so counts as alive after its last heartbeat."""

_LOOK: Final = Script.named("partition_look")
_GROUP: Final = Script.named("group_look")
_MEMBERS: Final = Script.named("members_look")
_CALL: Final = Script.named("members_call")
_MISSING: Final = Script.named("group_missing")
_COUNT: Final = Script.named("count_after")
_EXTEND: Final = Script.named("group_extend")


# --- looking ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition. ``delayed`` messages are not in the stream yet; ``dropped`` were lost to ``on_full="drop"``."""

    index: int
    stream: str
    length: int
    first_id: str | None
    last_id: str | None
    delayed: int
    trimmed_below: str | None
    dropped: int


@dataclass(frozen=True, slots=True)
class PartitionLook:
    """A partition, the last ID that it ever gave, its groups, and those whose deletion left a lease behind."""

    info: PartitionInfo
    end: str
    groups: frozenset[bytes]
    deleted_groups: frozenset[bytes]


async def look_at(instance: Instance, stream: str, index: int = 0) -> PartitionLook:
    """What there is to know of one partition."""
    reply = await instance.run(stream, _LOOK([stream, instance.keys.delayed(stream), instance.keys.trim(stream)]))
    length, first, last, end, delayed, trimmed, dropped, groups, deleted = reply
    info = PartitionInfo(index, stream, length, _id(first), _id(last), delayed, _id(trimmed), int(dropped))
    return PartitionLook(info, end.decode(), frozenset(groups), frozenset(deleted))


async def look_at_all(instance: Instance, topic: Topic) -> list[PartitionLook]:
    """What there is to know of each partition."""
    streams = enumerate(topic.streams(instance.keys))
    return await asyncio.gather(*(look_at(instance, stream, index) for index, stream in streams))


async def group_names(instance: Instance, topic: Topic, looks: Iterable[PartitionLook] | None = None) -> list[str]:
    """Every group that has subscribed to the topic, or exists on one of its streams, sorted."""
    looks = await look_at_all(instance, topic) if looks is None else looks
    names = set(await instance.ask("SMEMBERS", instance.keys.groups(topic.name))).union(
        *(look.groups for look in looks)
    )
    return sorted(topic.spark_groups.union(name.decode(errors="replace") for name in names))


async def existing_group(instance: Instance, topic: Topic, group: str) -> str:
    """``group``, or ``ConfigError`` if the topic has no such group."""
    if group not in await group_names(instance, topic):
        raise ConfigError(f"topic {topic.name!r} has no group {group!r}")
    return group


@dataclass(frozen=True, slots=True)
class GroupLook:
    """How a group stands on one partition. ``last`` is the last entry there."""

    now: int
    owner: str
    epoch: int
    until: int
    parked: int
    last: str | None
    exists: bool
    delivered: str | None
    pending: int
    oldest: str | None
    lag: int
    """-1 where the server does not know it."""

    @property
    def is_owned(self) -> bool:
        """Whether some member holds the lease."""
        return bool(self.owner) and self.until > self.now


async def look_at_group(instance: Instance, topic: Topic, group: str) -> list[GroupLook]:
    """How a group stands on each partition."""
    return await asyncio.gather(*(_look_at_group(instance, stream, group) for stream in topic.streams(instance.keys)))


async def _look_at_group(instance: Instance, stream: str, group: str) -> GroupLook:
    keys = [stream, instance.keys.lease(stream, group), instance.keys.retry(stream, group), instance.keys.trim(stream)]
    reply = await instance.run(stream, _GROUP(keys, instance.clock.offset_ms, group))
    now, owner, epoch, until, parked, last, exists, delivered, pending, oldest, lag = reply
    lease = owner.decode(), int(epoch), int(float(until)), parked
    return GroupLook(int(now), *lease, _id(last), exists == b"1", _id(delivered), pending, _id(oldest), lag)


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A live consumer of a group: its configured ``name``, its unique ``id``, and when it was last heard of."""

    name: str
    id: str
    heartbeat_at: dt.datetime
    heartbeat_age: float


async def members_of(instance: Instance, topic: Topic, group: str) -> list[MemberInfo]:
    """The members whose last heartbeat is not too old."""
    keys = [instance.keys.members(topic.name, group), instance.keys.members_info(topic.name, group)]
    now, *rest = await instance.run(keys[0], _MEMBERS(keys, instance.clock.offset_ms))
    found = list[MemberInfo]()
    for member, beat, about in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        at, id = int(float(beat)), member.decode()
        if int(now) - at <= codec.decode(about).get("ttl_ms", _TTL_MS):
            found.append(MemberInfo(name_of(id), id, moment(at), max(int(now) - at, 0) / 1000))
    return found


def name_of(member: str) -> str:
    """The configured name of a consumer."""
    return member.partition("#")[0]


async def live_members(instance: Instance, topic: Topic, group: str) -> list[str]:
    """The members with a recent heartbeat, or with a lease that has not run out."""
    members, looks = await asyncio.gather(members_of(instance, topic, group), look_at_group(instance, topic, group))
    return sorted({member.id for member in members} | {look.owner for look in looks if look.is_owned})


async def call_members(instance: Instance, topic: str, group: str) -> None:
    """Ask the members of a group to look again."""
    key = instance.keys.members(topic, group)
    await instance.run(key, _CALL([key, instance.keys.generation(topic, group)]))


async def count_after(instance: Instance, stream: str, since: str, until: str, limit: int) -> tuple[int, str]:
    """Up to ``limit`` entries after ``since`` up to ``until``: how many there are, and the ID of the last one."""
    counted = 0
    while counted < limit:
        count, last = await instance.run(stream, _COUNT([stream], since, until, min(_COUNTED, limit - counted)))
        counted += count
        if not last:
            return counted, until
        since = last.decode()
    return counted, since


# --- on every partition -----------------------------------------------------------------------------------


async def on_every_partition(registry: Registry, topic: Topic, work: Callable[[range], Awaitable[None]]) -> Topic:
    """Do ``work`` for all partitions, and for those that are announced meanwhile; the topic as it is then."""
    done = 0
    while done < topic.span:
        await work(range(done, topic.span))
        done = topic.span
        if not topic.legacy:
            topic = await registry.fetch_or_none(topic.name) or topic
    return topic


async def found_group(instance: Instance, registry: Registry, topic: Topic, group: str, start: str) -> Topic:
    """Put ``group`` on every partition: after the ID ``start`` if it is new, else at the beginning; the topic then.

    Until this returns the group is promised nothing. From then on retention keeps for it what the partitions hold, and
    whatever is written to the topic.

    The first partition comes last: as long as the group is not there it is new, also to a consumer that does the same.
    """
    await instance.enlist(instance.keys.groups(topic.name), group)
    first, place = topic.stream(instance.keys, 0), start

    async def put(partitions: range) -> None:
        nonlocal place
        names = await _without(instance, [topic.stream(instance.keys, index) for index in partitions], group)
        if partitions.start == 0 and (first not in names or await is_group_there(instance.link, first, group)):
            place = BEGINNING  # it is not new
        failures = await asyncio.gather(*(_create(instance, name, group, place) for name in names[1:]))
        failures += [await _create(instance, name, group, place) for name in names[:1]]
        if len(failures) == len(partitions) and None not in failures:
            instance.link.refuse(names[0], next(failure for failure in failures if failure is not None))
        # What is added from here on has nothing that is older than the group.
        place = BEGINNING if place == "$" else place

    return await on_every_partition(registry, topic, put)


async def _without(instance: Instance, names: Sequence[str], group: str) -> list[str]:
    """Those of the streams that do not have the group, as far as can be told, asked in one write a node."""
    parts = list(by_number(names, 1 if instance.link.address.kind == "cluster" else _PAGE))
    replies = await run_everywhere(instance.link, [(part[0], _MISSING(part, group)) for part in parts])
    found = [range(1, _PAGE + 1) if isinstance(reply, Exception) else reply for reply in replies]
    return [name for part, some in zip(parts, found, strict=True) for at, name in enumerate(part, 1) if at in some]


async def _create(instance: Instance, stream: str, group: str, start: str) -> Exception | None:
    """Why the stream cannot have groups, if it cannot: one bad partition does not stop the others."""
    refusal = await create_group(instance.link, stream, group, start)
    if refusal is not None:
        if not is_no_stream(refusal):
            instance.link.refuse(stream, refusal)
        _log.error("group %r cannot be created on %r: %s", group, stream, refusal)
    return refusal


async def extend_groups(instance: Instance, topic: Topic, looks: Sequence[PartitionLook], announced_ms: int) -> None:
    """Put all groups but Spark's on the partitions that ``topic`` is about to get, at their beginning.

    These are the groups that subscribed, and those of other programs that are on each partition which holds something.
    A group that was deleted from a new partition since the growth was announced stays away.
    """
    there = frozenset[bytes]().union(*(look.groups for look in looks))
    subscribed = there.intersection(await instance.ask("SMEMBERS", instance.keys.groups(topic.name)))
    used = [look.groups for look in looks if look.end != BEGINNING]
    groups = sorted((subscribed | there.intersection(*used)) - {group.encode() for group in topic.spark_groups})
    added = range(topic.partitions, topic.span)
    await asyncio.gather(
        *(_extend(instance, topic.stream(instance.keys, index), groups, announced_ms) for index in added)
    )


async def _extend(instance: Instance, stream: str, groups: Sequence[bytes], announced_ms: int) -> None:
    for page in by_number(groups, _PAGE):
        leases = [instance.keys.lease(stream, group.decode(errors="replace")) for group in page]
        if await instance.run(stream, _EXTEND([stream, *leases], announced_ms, *page)) < 0:
            _log.error("no group can be put on %r: it is no stream", stream)
            return


def _id(raw: bytes) -> str | None:
    return raw.decode() or None
