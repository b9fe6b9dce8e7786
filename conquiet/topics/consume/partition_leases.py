"""The leases on partitions that one consumer holds, over all its topics: taken, renewed and released together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from conquiet.errors import GroupLostError
from conquiet.kit.chunks import by_number
from conquiet.kit.holding import Holder
from conquiet.kit.retrying import Lines
from conquiet.topics.server.external_groups import spark_owned
from conquiet.topics.server.members import Identity
from conquiet.topics.server.topics import Topic
from conquiet.wire.connections import Connections
from conquiet.wire.lease import Lease, renewal_timeout
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script, run_everywhere

__all__ = ["Acquired", "Owners", "PartitionLeases"]

_log = logging.getLogger("conquiet.topics")

_LOOK: Final = Script.named("leases_look")
_ACQUIRE: Final = Script.named("partition_acquire")
_RELEASE: Final = Script.named("partition_release")
_LOST: Final = {"fail": "fail", "earliest": "0-0", "latest": "$", "resume": "resume"}
_TOGETHER: Final = 1000
"""Leases that one call looks at."""


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
    resets: list[Reply]
    """For each partition, how often the group was put elsewhere there."""
    next_look: float
    """Seconds until the first lease of another member can run out."""


class PartitionLeases(Holder[Acquired]):
    """The leases of one consumer, renewed in one write a node, together with the ``beats`` of its membership.

    The connections for that are on the private loop. One that has gone silent is given up in time for another try.
    """

    def __init__(
        self,
        who: Identity,
        beats: Callable[[], list[tuple[str, Call]]],
        lost: Callable[[Acquired, str], None],
        lines: Lines,
    ) -> None:
        self._instance = who.instance
        self._group = who.group
        self._me = who.me
        self._options = who.options
        self._beats = beats
        ttl, clock, name = who.options.lease_ttl, who.instance.clock, f"consumer {who.me!r}"
        self._link = Connections(who.instance.link.address.answering_within(renewal_timeout(ttl)))
        super().__init__(_stream, self._renew_all, lost, self._link.aclose, ttl, clock, name, lines)

    async def owners(self, topic: Topic, now: int) -> Owners:
        """Who holds each partition at the server's time ``now``."""
        leases = [self._lease_key(stream) for stream in topic.streams(self._instance.keys)]
        size = 1 if self._instance.link.address.kind == "cluster" else _TOGETHER
        asked = [(some[0], _LOOK(some)) for some in by_number(leases, size)]
        rows: list[Reply] = []
        for (key, _), reply in zip(asked, await run_everywhere(self._instance.link, asked), strict=True):
            if isinstance(reply, Exception):
                self._instance.link.refuse(key, reply)
            rows += reply
        members = dict[int, str]()
        first = self._options.lease_ttl
        for index, (owner, until) in enumerate(zip(rows[::3], rows[1::3], strict=True)):
            if owner and int(float(until)) > now:
                members[index] = owner.decode()
                if members[index] != self._me:
                    first = min(first, (int(float(until)) - now) / 1000 + 0.02)
        return Owners(members, rows[2::3], first)

    async def acquire(
        self, topic: Topic, indexes: Sequence[int], known: Collection[int], since: int, limits: Mapping[int, str]
    ) -> list[Acquired]:
        """Take partitions, to be read up to their ``limits``; those that are held now.

        Others hold the rest, or it cannot be read. ``since`` is the server's time at which the consumer joined;
        ``known`` are the partitions on which the group is known to have been.
        """
        options, clock = self._options, self._instance.clock
        streams = [topic.stream(self._instance.keys, index) for index in indexes]
        who, how = (self._me, round(options.lease_ttl * 1000)), (clock.offset_ms, self._group, "0-0", since)
        lost, asked = _LOST[options.on_group_lost], clock.monotonic()
        calls = [
            (stream, _ACQUIRE([self._lease_key(stream), stream], *who, *how, "1" if index in known else "0", lost))
            for index, stream in zip(indexes, streams, strict=True)
        ]
        replies = await run_everywhere(self._instance.link, calls)
        taken: list[Acquired] = []
        for index, stream, reply in zip(indexes, streams, replies, strict=True):
            if isinstance(reply, Exception):  # one bad partition does not stop the others
                _log.error("group %r: cannot take %r: %s", self._group, stream, reply)
            elif reply[0] == b"OK":
                epoch, crashed, running, last = (part.decode() for part in reply[1:])
                lease = Lease.acquired(self._lease_key(stream), self._me, int(epoch), options.lease_ttl, asked)
                taken.append(Acquired(topic, index, stream, lease, crashed, running, last, limits.get(index)))
        self.add(taken, asked)
        for stream, reply in zip(streams, replies, strict=True):
            self._check(topic, stream, reply)
        return taken

    def _check(self, topic: Topic, stream: str, reply: Reply) -> None:
        status = None if isinstance(reply, Exception) else reply[0]
        if status == b"SPARK":
            raise spark_owned(topic, self._group)
        if status == b"DELETED":
            raise GroupLostError(f"group {self._group!r} of topic {topic.name!r} was deleted")
        if status == b"NOGROUP":
            raise GroupLostError(f"group {self._group!r} is gone from {stream!r}, and where it stood is not known")

    async def release(self, given: Sequence[Acquired]) -> list[Acquired]:
        """Give partitions up that are not held any more; those that were lost before."""
        keys = [[one.lease.key, one.stream] for one in given]
        words = [(one.lease.owner, one.lease.epoch, self._group) for one in given]
        calls = [(pair[1], _RELEASE(pair, *more)) for pair, more in zip(keys, words, strict=True)]
        return [one for one, reply in zip(given, await self._instance.insist(calls), strict=True) if reply == 0]

    async def _renew_all(self, held: Sequence[Acquired]) -> Collection[Acquired]:
        """On the private loop. Whatever becomes of one of these calls, the others are made, and count."""
        asked, offset = self._instance.clock.monotonic(), self._instance.clock.offset_ms
        calls = [(one.lease.key, one.lease.renewal(offset)) for one in held] + self._beats()
        replies = await run_everywhere(self._link, calls)
        for one, reply in zip(held, replies, strict=False):
            one.lease.renewed(reply, asked)
        gone = [one for one in held if one.lease.lost and self.has(one)]  # else it was given up meanwhile
        for (key, _), reply in zip(calls, replies, strict=True):
            if isinstance(reply, Exception):
                self.refused(gone)
                self._link.refuse(key, reply)
        return gone

    def _lease_key(self, stream: str) -> str:
        return self._instance.keys.lease(stream, self._group)


def _stream(acquired: Acquired) -> str:
    return acquired.stream
