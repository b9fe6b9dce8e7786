"""A group on every partition of its topic, also on those that the topic is about to get.

Retention keeps what the groups of a partition have not finished; of a group that is not there it knows nothing. So no
partition is written to before every group of the topic is on it. Two rules see to that, whatever happens at the same
time. Whoever adds partitions announces that first, and asks then which groups there are. Whoever makes, moves or
removes a group does so on all partitions first, and asks then whether more are announced. One of both finds the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from conquiet.kit.chunks import by_number
from conquiet.topics.server.instance import Site
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire import streams
from conquiet.wire.scripts import Script, run_everywhere
from conquiet.wire.streams import pack

__all__ = ["Stand", "extend_groups", "found_group", "look_at_groups", "on_every_partition"]

_log = logging.getLogger("conquiet.topics")

_PAGE: Final = 500
"""Groups that one call puts on a partition."""
_NEVER: Final = "0-0"
"""The last ID of a stream that was never given one, and the place of a group that begins with the first."""

_LOOK: Final = Script.named("partition_look")
_EXTEND: Final = Script.named("group_extend")
_MISSING: Final = Script.named("group_missing")


async def on_every_partition(registry: Registry, topic: Topic, work: Callable[[range], Awaitable[None]]) -> Topic:
    """Do ``work`` for all partitions, and for those that are announced meanwhile; the topic as it is then."""
    done = 0
    while done < topic.span:
        await work(range(done, topic.span))
        done = topic.span
        if not topic.legacy:
            topic = await registry.look_up(topic.name) or topic
    return topic


# --- making a group ---------------------------------------------------------------------------------------


async def found_group(site: Site, registry: Registry, topic: Topic, group: str, start: str) -> Topic:
    """Put ``group`` on every partition: after the ID ``start`` if it is new, else at the beginning; the topic then.

    Until this returns the group is promised nothing. From then on retention keeps for it what the partitions hold, and
    whatever is written to the topic.

    The first partition comes last: as long as the group is not there it is new, also to whoever does the same.
    """
    key, first = site.keys.groups(topic.name), topic.stream(site.keys, 0)
    if not await site.link.call(key, pack("SISMEMBER", key, group)):
        await site.link.call(key, pack("SADD", key, group))
    place = start

    async def put(partitions: range) -> None:
        nonlocal place
        names = await _without(site, [topic.stream(site.keys, index) for index in partitions], group)
        if partitions.start == 0 and (first not in names or await _is_there(site, first, group)):  # it is not new
            place = _NEVER
        failures = await asyncio.gather(*(_create(site, name, group, place) for name in names[1:]))
        failures += [await _create(site, name, group, place) for name in names[:1]]
        if len(failures) == len(partitions) and None not in failures:
            site.link.refuse(names[0], next(failure for failure in failures if failure is not None))
        # What is added from here on has nothing that is older than the group.
        place = _NEVER if place == "$" else place

    return await on_every_partition(registry, topic, put)


async def _without(site: Site, names: Sequence[str], group: str) -> list[str]:
    """Those of the streams that do not have the group, as far as can be told, asked in one write a node."""
    parts = list(by_number(names, 1 if site.link.address.kind == "cluster" else _PAGE))
    replies = await run_everywhere(site.link, [(part[0], _MISSING(part, group)) for part in parts])
    found = [range(1, _PAGE + 1) if isinstance(reply, Exception) else reply for reply in replies]
    return [name for part, some in zip(parts, found, strict=True) for at, name in enumerate(part, 1) if at in some]


async def _create(site: Site, stream: str, group: str, start: str) -> Exception | None:
    """Why the stream cannot have groups, if it cannot: one bad partition does not stop the others."""
    [reply] = await site.link.call_many(stream, (streams.xgroup_create(stream, group, start),))
    if not isinstance(reply, Exception) or str(reply).startswith("BUSYGROUP"):
        return None
    if await _is_there(site, stream, group):  # a server whose memory is full refuses to make even what is there
        return None
    if not str(reply).startswith("WRONGTYPE"):
        site.link.refuse(stream, reply)
    _log.error("group %r cannot be created on %r: %s", group, stream, reply)
    return reply


async def _is_there(site: Site, stream: str, group: str) -> bool:
    [groups] = await site.link.call_many(stream, (streams.xinfo_groups(stream),))
    return not isinstance(groups, Exception) and streams.group_named(groups, group) is not None


# --- adding partitions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stand:
    """The last ID that a partition has given, and the groups on it."""

    end: str
    groups: frozenset[bytes]


async def look_at_groups(site: Site, stream: str) -> Stand:
    """How a partition stands."""
    reply = await site.run(stream, _LOOK([stream, site.keys.delayed(stream), site.keys.trim(stream)]))
    return Stand(reply[3].decode(), frozenset(reply[7]))


async def extend_groups(site: Site, topic: Topic, stands: Sequence[Stand], announced_ms: int) -> None:
    """Put all groups but Spark's on the partitions that ``topic`` is about to get, at their beginning.

    These are the groups that subscribed, and those of other programs that are on each partition which holds something.
    A group that was deleted from a new partition since the growth was announced stays away.
    """
    key = site.keys.groups(topic.name)
    there = frozenset[bytes]().union(*(stand.groups for stand in stands))
    subscribed = there.intersection(await site.link.call(key, pack("SMEMBERS", key)))
    used = [stand.groups for stand in stands if stand.end != _NEVER]
    groups = sorted((subscribed | there.intersection(*used)) - {group.encode() for group in topic.spark_groups})
    added = range(topic.partitions, topic.span)
    await asyncio.gather(*(_extend(site, topic.stream(site.keys, index), groups, announced_ms) for index in added))


async def _extend(site: Site, stream: str, groups: Sequence[bytes], announced_ms: int) -> None:
    for page in by_number(groups, _PAGE):
        if await site.run(stream, _EXTEND([stream, *_leases(site, stream, page)], announced_ms, *page)) < 0:
            _log.error("no group can be put on %r: it is no stream", stream)
            return


def _leases(site: Site, stream: str, groups: Iterable[bytes]) -> list[str]:
    return [site.keys.lease(stream, group.decode(errors="replace")) for group in groups]
