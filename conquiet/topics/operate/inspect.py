"""What topics and groups look like from outside."""

from __future__ import annotations

import asyncio
import datetime as dt
import sys
from dataclasses import dataclass
from typing import Literal

from conquiet.kit.entry_ids import BEGINNING, moment, order
from conquiet.topics.options import Retention
from conquiet.topics.server import group as groups
from conquiet.topics.server.group import GroupLook, MemberInfo, PartitionInfo, count_after
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic

__all__ = [
    "Counting",
    "GroupInfo",
    "GroupPartition",
    "TopicInfo",
    "describe_group",
    "describe_topic",
]


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
    """How a group stands on a topic; ``unowned`` are the partitions that no consumer owns now.

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


@dataclass(slots=True)
class Counting:
    """How many entries may be counted on each partition where the server does not know a lag; how many were, in all."""

    limit: int = sys.maxsize
    done: int = 0


async def describe_topic(instance: Instance, topic: Topic) -> TopicInfo:
    """The topic as it is now; partitions are looked at one after the other, so the sums are not of one moment."""
    looks = await groups.look_at_all(instance, topic)
    parts = tuple(look.info for look in looks)
    ids = sorted((id for part in parts for id in (part.first_id, part.last_id) if id is not None), key=order)
    return TopicInfo(
        topic.name,
        topic.partitions,
        sum(part.length for part in parts),
        ids[0] if ids else None,
        ids[-1] if ids else None,
        moment(topic.created_ms) if topic.created_ms else None,
        moment(topic.updated_ms) if topic.updated_ms else None,
        topic.retention,
        topic.partitioner,
        len(await groups.group_names(instance, topic, looks)),
        await instance.ask("XLEN", instance.keys.dead_letters(topic.name)),
        topic.legacy,
        parts,
    )


async def describe_group(instance: Instance, topic: Topic, group: str, counting: Counting | None = None) -> GroupInfo:
    """The group as it is now; ``ConfigError`` if the topic has no such group.

    Within ``counting`` a lag may be too low: it is what was counted until then.
    """
    asked = groups.members_of(instance, topic, group), groups.look_at_group(instance, topic, group)
    members, looks = await asyncio.gather(*asked)
    if not any(look.exists for look in looks):
        await groups.existing_group(instance, topic, group)
    counting = Counting() if counting is None else counting
    pairs = zip(topic.streams(instance.keys), looks, strict=True)
    lags = await asyncio.gather(*(_lag(instance, stream, look, counting) for stream, look in pairs))
    beats = {member.id: member.heartbeat_at for member in members}
    parts = tuple(_group_partition(index, *pair, beats) for index, pair in enumerate(zip(looks, lags, strict=True)))
    is_spark = group in topic.spark_groups
    return GroupInfo(
        topic.name,
        group,
        sum(lags),
        sum(part.pending for part in parts),
        len(members),
        tuple(members),
        tuple(part.index for part in parts if part.owner is None and not is_spark),
        parts,
        "spark" if is_spark else "members",
    )


def _group_partition(index: int, look: GroupLook, lag: int, beats: dict[str, dt.datetime]) -> GroupPartition:
    owner = look.owner if look.is_owned else None
    return GroupPartition(
        index,
        lag,
        look.pending,
        look.delivered,
        None if owner is None else groups.name_of(owner),
        owner,
        look.epoch,
        None if owner is None else moment(look.until),
        None if owner is None else beats.get(owner),
        look.parked,
        look.oldest,
        None if look.oldest is None else max(look.now - order(look.oldest)[0], 0) / 1000,
    )


async def _lag(instance: Instance, stream: str, look: GroupLook, counting: Counting) -> int:
    """How many messages are not delivered yet: what the server knows for sure, else counted."""
    if look.lag >= 0 or look.delivered is None or look.last is None:
        return max(look.lag, 0)
    lag, counted_to = await count_after(instance, stream, look.delivered, look.last, counting.limit)
    counting.done += lag
    if counted_to == look.last:
        return lag
    # Many wait: perhaps there are few that do not, and so the others are known.
    read, counted_to = await count_after(instance, stream, BEGINNING, look.delivered, counting.limit)
    counting.done += read
    return max(lag, await instance.ask("XLEN", stream) - read) if counted_to == look.delivered else lag
