"""One consumer in one group, over all its topics: it joins, follows what happens in the group, and leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from conquiet.errors import GroupLostError, QueueError
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.service import Background
from conquiet.metrics import GroupMetrics
from conquiet.topics.consume.engine import Engine
from conquiet.topics.consume.member import Member
from conquiet.topics.consume.partition_leases import Acquired, PartitionLeases
from conquiet.topics.server.members import Identity, Members
from conquiet.topics.server.topics import TopicLike
from conquiet.wire.lease import Lease
from conquiet.wire.scripts import Call

__all__ = ["Membership"]

_log = logging.getLogger("conquiet.topics")

_GLANCE: Final = 0.25
"""How often a consumer looks whether something changed in its group, in seconds: one GET a topic, or one for all."""


class Membership:
    """The members of one consumer, one a topic, and the leases that they hold.

    Membership and leases are renewed every third of the lease's time from the private loop, so a handler that blocks
    its own loop costs neither. One loop asks for all topics whether something changed. ``failed`` hears what ends the
    consumer: its group or topic is gone, or not for it.
    """

    def __init__(
        self,
        who: Identity,
        crew: Engine,
        metrics_of: Callable[[str], GroupMetrics],
        failed: Callable[[Exception], None],
        lines: Lines,
    ) -> None:
        self._who = who
        self._crew = crew
        self._metrics_of = metrics_of
        self._failed = failed
        self._calls = Members(who)
        self.members: dict[str, Member] = {}
        """By topic; those that begin to join included."""
        self._lines = lines
        self.leases = PartitionLeases(who, self._beats, self._lost, self._lines)
        self._looking = Retrying(self._lines, who.instance.clock)
        self._changed = asyncio.Event()
        self._background = Background()

    async def join(self, topics: Sequence[TopicLike]) -> None:
        """Become a member in each topic, and take what is free there."""
        await self.leases.open()
        self._background.start(self._follow(), "member")
        for topic in topics:
            found = await self._who.registry.fetch(topic)
            metrics, start = self._metrics_of(found.name), self._background.start
            member = Member(self._who, topic, self._calls, self.leases, self._crew, metrics, start, self._changed)
            self.members[found.name] = member
            await member.join()

    async def stop(self) -> None:
        """Take no more, and begin no hand-over. What is being taken is held when this returns, or was not given."""
        await self._background.aclose()

    async def leave(self, busy: Collection[str] = ()) -> None:
        """Release every lease and go; the others notice at once. The caller has drained the partitions.

        Leases of the streams in ``busy``, where something still runs, are neither renewed nor released: they run out.
        """
        await self.leases.aclose()
        members = {name: member for name, member in self.members.items() if member.has_topic}
        await asyncio.gather(*(self._attempt(member.leave(busy)) for member in members.values()))
        await self._attempt(self._calls.end(list(members)))

    async def _attempt(self, work: Awaitable[None]) -> None:
        try:
            await work
        except QueueError as error:  # leases and membership run out by themselves
            self._lines.warn(f"group {self._who.group!r}: cannot leave", error)

    async def aclose(self) -> None:
        """Hold nothing more: what was not released runs out."""
        for held in self.leases.leases:
            self.leases.drop(held)
        for member in self.members.values():
            member.close()
        await asyncio.gather(self._background.aclose(), self.leases.aclose())

    # --- what happens in the group ----------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            await self._who.instance.clock.wait(self._changed, _GLANCE)
            self._changed.clear()
            await self._heeding("all topics", self._glance)

    async def _glance(self) -> None:
        """Ask for all topics together whether something changed; each that did is looked at beside the others."""
        idle = [member for member in self.members.values() if member.is_idle]
        generations = await self._calls.generations([member.topic.name for member in idle])
        self._looking.succeeded()
        for member, generation in zip(idle, generations, strict=True):
            if member.is_restless(generation):
                member.is_idle = False
                self._background.start(self._rebalance(member), "rebalance")

    async def _rebalance(self, member: Member) -> None:
        try:
            await self._heeding(f"topic {member.topic.name!r}", member.rebalance)
        finally:
            member.is_idle = True

    async def _heeding(self, where: str, look: Callable[[], Awaitable[None]]) -> None:
        """Look once. A server that does not answer is waited for; anything else ends the consumer."""
        try:
            await look()
        except GroupLostError as error:
            self._failed(error)
        except QueueError as error:
            await self._looking.failed(f"group {self._who.group!r} of {where}: cannot look", error)
        except Exception as error:
            self._failed(error)

    def lose(self, stream: str, lease: Lease) -> None:
        """A call was refused since this lease is another consumer's: forget it, and look again."""
        held = self.leases.get(stream)
        if held is not None and held.lease is lease:
            self.leases.lose(held, "a call was refused")

    def regroup(self, stream: str) -> None:
        """The server says that the group is gone: the lease is released, and taking it again decides."""
        held = self.leases.get(stream)
        if held is not None:
            self._background.start(self.members[held.topic.name].regroup(held), "regroup")

    def _lost(self, lost: Acquired, reason: str) -> None:
        self.members[lost.topic.name].lost(lost, reason)

    def _beats(self) -> list[tuple[str, Call]]:
        return [self._calls.beat(name) for name, member in list(self.members.items()) if member.since]
