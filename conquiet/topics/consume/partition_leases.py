"""The leases on the partitions of a topic: who holds which, and how a member takes, renews and releases them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from conquiet.errors import GroupLostError, QueueError
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.external_groups import spark_owned
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.connections import Connections
from conquiet.wire.lease import Lease
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script, run_many
from conquiet.wire.streams import pack

__all__ = ["Acquired", "Owners", "PartitionLeases"]

_log = logging.getLogger("conquiet.topics")

_ACQUIRE: Final = Script.named("partition_acquire")
_RELEASE: Final = Script.named("partition_release")
_LOST: Final = {"fail": "fail", "earliest": "0-0", "latest": "$", "resume": "resume"}


@dataclass(frozen=True, slots=True)
class Acquired:
    """A partition that was just taken, and what its last owner left behind."""

    topic: Topic
    index: int
    stream: str
    lease: Lease
    crashed: str
    running: str
    last_id: str
    limit: str | None = None


@dataclass(frozen=True, slots=True)
class Owners:
    """Who holds which partition of a topic now."""

    members: dict[int, str]
    resets: list[bytes | None]
    """For each partition, how often the group was put elsewhere there."""
    next_look: float
    """Seconds until the first lease of another member can run out."""


class PartitionLeases:
    """The leases of one member in one group."""

    def __init__(self, instance: Instance, group: str, me: str, options: SubscribeOptions) -> None:
        self._instance = instance
        self._group = group
        self._me = me
        self._options = options
        self.held: dict[int, Lease] = {}
        """Those that the member holds, by partition."""
        self.known: set[int] = set()
        """The partitions on which the group is known to have been."""
        self.since = 0
        """The server's time at which the member joined, in milliseconds."""

    async def owners(self, topic: Topic, now: int) -> Owners:
        """Who holds each partition at the server's time ``now``."""
        leases = [self._key(topic, index) for index in range(topic.partitions)]
        asked = (self._instance.link.call(key, pack("HMGET", key, "owner", "until_ms", "resets")) for key in leases)
        replies = await asyncio.gather(*asked)
        members: dict[int, str] = {}
        first = self._options.lease_ttl
        for index, (owner, until, _) in enumerate(replies):
            if owner and int(float(until)) > now:
                members[index] = owner.decode()
                if index not in self.held:
                    first = min(first, (int(float(until)) - now) / 1000 + 0.02)
        return Owners(members, [resets for _, _, resets in replies], first)

    async def acquire(self, topic: Topic, index: int, limit: str | None) -> Acquired | None:
        """Take a partition, to be read up to ``limit``; ``None`` if another holds it, or it cannot be read."""
        stream = topic.stream(self._instance.keys, index)
        key, options, clock = self._key(topic, index), self._options, self._instance.clock
        known = "1" if index in self.known else "0"
        lost = _LOST[options.on_group_lost]
        ttl = round(options.lease_ttl * 1000)
        asked = clock.monotonic()
        call = _ACQUIRE([key, stream], self._me, ttl, clock.offset_ms, self._group, "0-0", self.since, known, lost)
        try:
            status, *rest = await self._instance.run(stream, call)
        except QueueError as error:  # one bad partition does not stop the others
            _log.error("group %r: cannot take %r: %s", self._group, stream, error)
            return None
        if status == b"OK":
            return self._begin(topic, index, rest, asked, limit)
        if status == b"SPARK":
            raise spark_owned(topic, self._group)
        if status == b"DELETED":
            raise GroupLostError(f"group {self._group!r} of topic {topic.name!r} was deleted")
        if status == b"NOGROUP":
            raise GroupLostError(f"group {self._group!r} is gone from {stream!r}, and where it stood is not known")
        return None

    async def renew(self, link: Connections, index: int, lease: Lease) -> bool:
        """Prolong a lease over ``link``; whether it turned out to be lost while the member took it for held."""
        asked = self._instance.clock.monotonic()
        [reply] = await run_many(link, lease.key, [lease.renewal(self._instance.clock.offset_ms)])
        lease.renewed(reply, asked)
        if isinstance(reply, Exception):
            link.refuse(lease.key, reply)
        return lease.lost and self.held.get(index) is lease  # else it was given up, and the question came too late

    async def release(self, stream: str, lease: Lease) -> bool:
        """Give up the lease of a partition; whether it was still held."""
        call = _RELEASE([lease.key, stream], lease.owner, lease.epoch, self._group)
        return bool(await self._instance.insist(stream, call) != 0)

    def _begin(self, topic: Topic, index: int, reply: Iterable[Reply], asked: float, limit: str | None) -> Acquired:
        epoch, crashed, running, last = (part.decode() for part in reply)
        lease = Lease.acquired(self._key(topic, index), self._me, int(epoch), self._options.lease_ttl, asked)
        self.known.add(index)
        self.held[index] = lease
        return Acquired(topic, index, topic.stream(self._instance.keys, index), lease, crashed, running, last, limit)

    def _key(self, topic: Topic, index: int) -> str:
        return self._instance.keys.lease(topic.stream(self._instance.keys, index), self._group)
