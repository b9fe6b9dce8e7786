"""What topics and groups look like from outside."""

from __future__ import annotations

import asyncio
import datetime as dt
import sys
from dataclasses import dataclass
from typing import Final, Literal

from conquiet.errors import ConfigError
from conquiet.kit import codec
from conquiet.topics.format.entry_ids import moment, place
from conquiet.topics.options import Retention
from conquiet.topics.outside.scan import BEGINNING, count_after
from conquiet.topics.server.instance import Site
from conquiet.topics.server.topics import Topic
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script
from conquiet.wire.streams import pack, xlen

__all__ = [
    "Counting",
    "GroupInfo",
    "GroupPartition",
    "Look",
    "MemberInfo",
    "PartitionInfo",
    "TopicInfo",
    "describe_group",
    "describe_topic",
    "group_names",
    "live_members",
    "look_at",
]

_TTL_MS: Final = 15_000
"""How long a member that does not say so counts as alive after it was heard of."""

_PARTITION: Final = Script.named("partition_look")
_GROUP: Final = Script.named("group_look")
_MEMBERS: Final = Script.named("members_look")


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
class TopicInfo:
    """A topic as a whole; ``first_id`` and ``last_id`` are the lowest and highest over its partitions.

    ``groups`` and ``dead_letters`` are numbers. A legacy stream does not know when it was ``created``.
    """

    name: str
    partitions: int
    length: int
    first_id: str | None
    last_id: str | None
    created: dt.datetime | None
    updated: dt.datetime | None
    retention: Retention
    partitioner: str
    groups: int
    dead_letters: int
    legacy: bool
    by_partition: tuple[PartitionInfo, ...]


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A live consumer of a group: its configured ``name``, its unique ``id``, and when it was last heard of."""

    name: str
    id: str
    heartbeat_at: dt.datetime
    heartbeat_age: float


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """How a group stands on one partition.

    ``lag`` is the number of messages that were not delivered to it yet. ``owner`` is the configured name of the
    consumer whose lease has not run out. ``retry_depth`` entries wait for their retry. ``oldest_pending_age`` is
    the time, in seconds, since the oldest unfinished entry was appended.
    """

    index: int
    lag: int
    pending: int
    last_delivered_id: str | None
    owner: str | None
    owner_id: str | None
    epoch: int
    lease_until: dt.datetime | None
    heartbeat_at: dt.datetime | None
    retry_depth: int
    oldest_pending_id: str | None
    oldest_pending_age: float | None


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """How a group stands on a topic; ``unowned`` are the partitions that nobody serves now.

    The group of a Spark query (``owner`` is ``"spark"``) has a place and a lag, and neither members nor anything
    pending; no partition of it is to be owned.
    """

    topic: str
    group: str
    lag: int
    pending: int
    consumers: int
    members: tuple[MemberInfo, ...]
    unowned: tuple[int, ...]
    partitions: tuple[GroupPartition, ...]
    owner: Literal["members", "spark"] = "members"


# --- topics ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """A partition, the groups on it, and those that were deleted from it."""

    info: PartitionInfo
    groups: frozenset[str]
    deleted_groups: frozenset[str]


async def look_at(site: Site, stream: str, index: int = 0) -> Look:
    """What there is to know of one partition."""
    keys = [stream, site.keys.delayed(stream), site.keys.trim(stream)]
    reply = await site.run(stream, _PARTITION(keys))
    length, first, last, _, delayed, trimmed, dropped, groups, deleted = reply
    info = PartitionInfo(index, stream, length, _id(first), _id(last), delayed, _id(trimmed), int(dropped))
    return Look(info, _names(groups), _names(deleted))


async def describe_topic(site: Site, topic: Topic) -> TopicInfo:
    """The topic as it is now; partitions are looked at one after the other, so the sums are not of one moment."""
    looks = await _looks(site, topic)
    letters = site.keys.dead_letters(topic.name)
    parts = [look.info for look in looks]
    ids = [(place(id), id) for part in parts for id in (part.first_id, part.last_id) if id is not None]
    return TopicInfo(
        topic.name,
        topic.partitions,
        sum(part.length for part in parts),
        min(ids)[1] if ids else None,
        max(ids)[1] if ids else None,
        moment(topic.created_ms) if topic.created_ms else None,
        moment(topic.updated_ms) if topic.updated_ms else None,
        topic.retention,
        topic.partitioner,
        len(await _all_names(site, topic, looks)),
        await site.link.call(letters, xlen(letters)),
        topic.legacy,
        tuple(parts),
    )


async def group_names(site: Site, topic: Topic) -> list[str]:
    """Every group that has subscribed to the topic, or exists on one of its streams."""
    return sorted(await _all_names(site, topic, await _looks(site, topic)))


async def _looks(site: Site, topic: Topic) -> list[Look]:
    streams = enumerate(topic.streams(site.keys))
    return await asyncio.gather(*(look_at(site, stream, index) for index, stream in streams))


async def _all_names(site: Site, topic: Topic, looks: list[Look]) -> set[str]:
    key = site.keys.groups(topic.name)
    known = _names(await site.link.call(key, pack("SMEMBERS", key)))
    return set(known.union(topic.spark_groups, *(look.groups for look in looks)))


# --- groups ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stand:
    """The reply of ``group_look``."""

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

    @property
    def is_owned(self) -> bool:
        return bool(self.owner) and self.until > self.now


@dataclass(slots=True)
class Counting:
    """How many entries may be counted on each partition where the server does not know a lag; how many were, in all."""

    most: int
    done: int = 0


async def describe_group(site: Site, topic: Topic, group: str, counting: Counting | None = None) -> GroupInfo:
    """The group as it is now; ``ConfigError`` if the topic has no such group.

    Within ``counting`` a lag may be too low: it is what was counted until then.
    """
    members, stands = await asyncio.gather(_members(site, topic, group), _stands(site, topic, group))
    if not any(stand.exists for stand in stands) and group not in await group_names(site, topic):
        raise ConfigError(f"topic {topic.name!r} has no group {group!r}")
    heard = {member.id: member.heartbeat_at for member in members}
    streams = topic.streams(site.keys)
    work = (_lag(site, stream, stand, counting) for stream, stand in zip(streams, stands, strict=True))
    lags = await asyncio.gather(*work)
    parts = [
        _group_partition(index, stand, lag, heard) for index, (stand, lag) in enumerate(zip(stands, lags, strict=True))
    ]
    is_spark = group in topic.spark_groups
    return GroupInfo(
        topic.name,
        group,
        sum(lags),
        sum(part.pending for part in parts),
        len(members),
        tuple(members),
        tuple(part.index for part in parts if part.owner is None and not is_spark),
        tuple(parts),
        "spark" if is_spark else "members",
    )


async def live_members(site: Site, topic: Topic, group: str) -> list[str]:
    """The consumers that were heard of lately, or hold a lease that has not run out."""
    members, stands = await asyncio.gather(_members(site, topic, group), _stands(site, topic, group))
    return sorted({member.id for member in members} | {stand.owner for stand in stands if stand.is_owned})


def _group_partition(index: int, stand: _Stand, lag: int, heard: dict[str, dt.datetime]) -> GroupPartition:
    owner = stand.owner if stand.is_owned else None
    age = None if stand.oldest is None else max(stand.now - place(stand.oldest)[0], 0) / 1000
    return GroupPartition(
        index,
        lag,
        stand.pending,
        stand.delivered,
        None if owner is None else owner.partition("#")[0],
        owner,
        stand.epoch,
        None if owner is None else moment(stand.until),
        None if owner is None else heard.get(owner),
        stand.parked,
        stand.oldest,
        age,
    )


async def _members(site: Site, topic: Topic, group: str) -> list[MemberInfo]:
    keys = [site.keys.members(topic.name, group), site.keys.members_info(topic.name, group)]
    now, *rest = await site.run(keys[0], _MEMBERS(keys, site.clock.offset_ms))
    found = list[MemberInfo]()
    for member, beat, about in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        age, id = int(now) - int(float(beat)), member.decode()
        if age <= codec.decode(about).get("ttl_ms", _TTL_MS):
            found.append(MemberInfo(id.partition("#")[0], id, moment(int(float(beat))), max(age, 0) / 1000))
    return found


async def _stands(site: Site, topic: Topic, group: str) -> list[_Stand]:
    return await asyncio.gather(*(_stand(site, stream, group) for stream in topic.streams(site.keys)))


async def _stand(site: Site, stream: str, group: str) -> _Stand:
    keys = [stream, site.keys.lease(stream, group), site.keys.retry(stream, group), site.keys.trim(stream)]
    reply: Reply = await site.run(stream, _GROUP(keys, site.clock.offset_ms, group))
    now, owner, epoch, until, parked, last, exists, delivered, pending, oldest, lag = reply
    return _Stand(
        int(now),
        owner.decode(),
        int(epoch),
        int(float(until)),
        parked,
        _id(last),
        exists == b"1",
        _id(delivered),
        pending,
        _id(oldest),
        lag,
    )


async def _lag(site: Site, stream: str, stand: _Stand, counting: Counting | None) -> int:
    """How many messages are not delivered yet: what the server knows for sure, else counted."""
    if stand.lag >= 0 or stand.delivered is None or stand.last is None:
        return max(stand.lag, 0)
    counting = counting or Counting(sys.maxsize)
    lag, counted_to = await count_after(site, stream, stand.delivered, stand.last, counting.most)
    counting.done += lag
    if counted_to == stand.last:
        return lag
    # Many wait: perhaps there are few that do not, and so the others are known.
    read, counted_to = await count_after(site, stream, BEGINNING, stand.delivered, counting.most)
    counting.done += read
    if counted_to == stand.delivered:
        lag = max(lag, await site.link.call(stream, xlen(stream)) - read)
    return lag


def _id(raw: bytes) -> str | None:
    return raw.decode() or None


def _names(raw: list[bytes]) -> frozenset[str]:
    return frozenset(name.decode(errors="replace") for name in raw)
