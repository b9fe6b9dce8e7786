"""One member of a group: it joins, owns its share of the partitions, rebalances and leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol

from conquiet.errors import ConfigError, GroupLostError, QueueError, UnknownTopicError
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import on_private_loop
from conquiet.kit.service import to_its_end
from conquiet.metrics import GroupMetrics
from conquiet.topics.consume.assignment import assign
from conquiet.topics.consume.growth_limits import HOLD, Gate
from conquiet.topics.consume.membership import Membership
from conquiet.topics.consume.partition_leases import Acquired, PartitionLeases
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server import growth
from conquiet.topics.server.external_groups import refuse_spark, settled
from conquiet.topics.server.group import found_group
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic, TopicLike
from conquiet.wire.connections import Connections
from conquiet.wire.lease import Lease

__all__ = ["Crew", "Member"]

_log = logging.getLogger("conquiet.topics")

_GLANCE: Final = 0.25
"""How often a member looks whether something changed in its group, in seconds: one GET."""


class Crew(Protocol):
    """Works on the partitions that a member owns."""

    def add(self, acquired: Acquired) -> None:
        """Begin with a partition."""
        ...

    async def drain(self, stream: str) -> None:
        """Finish what is being handled of a partition and begin nothing more; its lease may still be lost."""
        ...

    def limit(self, stream: str, id: str | None) -> None:
        """Take new entries of a partition up to ``id`` only, or all."""
        ...

    def drop(self, stream: str) -> None:
        """Forget a partition whose lease is lost or released."""
        ...


class Member:
    """Keeps one consumer in one group of one topic.

    Membership and leases are renewed every third of the lease's time from the private loop, so a handler that
    blocks its own loop costs neither. All members compute the same assignment from what they see in Redis. A member
    that owns too much finishes what it handles and releases it; no member takes what another still holds.
    """

    def __init__(
        self,
        instance: Instance,
        registry: Registry,
        topic: TopicLike,
        group: str,
        me: str,
        options: SubscribeOptions,
        crew: Crew,
        metrics: GroupMetrics,
    ) -> None:
        self._instance = instance
        self._registry = registry
        self._name = topic
        self._group = group
        self._me = me
        self._options = options
        self._crew = crew
        self._metrics = metrics
        self._topic: Topic | None = None
        self._membership = Membership(instance, group, me, options)
        self._leases = PartitionLeases(instance, group, me, options)
        self._draining: dict[int, asyncio.Task[None]] = {}
        self._limits: dict[int, str] = {}
        self._resets: list[bytes | None] = []
        self._gate = Gate(instance, group)
        self._is_established = False
        self._look_at = 0.0
        self._changed = asyncio.Event()
        self._beating = Connections(instance.link.address)
        self._keepalive = Keepalive(self._beat, options.lease_ttl / 3, instance.clock)

    @property
    def has_topic(self) -> bool:
        """Whether it has seen its topic: not while it begins to join, nor ever if that failed or was cancelled."""
        return self._topic is not None

    @property
    def topic(self) -> Topic:
        """The topic as this member last saw it."""
        assert self._topic is not None
        return self._topic

    @property
    def owned(self) -> list[int]:
        """The partitions whose leases it holds."""
        return sorted(self._leases.held)

    # --- from joining to leaving ------------------------------------------------------------------------

    async def join(self) -> None:
        """Make sure that topic and group exist, become a member and take what is free."""
        topic = await self._grown(await self._registry.fetch(self._name))
        refuse_spark(topic, self._group)
        self._topic = topic
        if self._topic.legacy and self._options.retry.mode == "requeue":
            raise ConfigError("a legacy stream cannot carry requeued messages: retry there with mode='park'")
        await self._ensure_group(self._topic)
        self._leases.since, _ = await self._membership.renew(topic.name)
        self._loop = asyncio.get_running_loop()
        await self._keepalive.start()
        await self._rebalance()

    async def run(self, start: Callable[[Any, str], asyncio.Task[None]]) -> None:
        """Follow the group until cancelled, or until it or the topic is gone; ``start`` runs hand-overs beside it."""
        self._start = start
        while True:
            await self._instance.clock.wait(self._changed, _GLANCE)
            try:
                if await self._is_restless():
                    await self._rebalance()
            except (GroupLostError, UnknownTopicError):
                raise
            except QueueError as error:
                _log.warning("group %r of topic %r: cannot look: %s", self._group, self.topic.name, error)

    async def leave(self) -> None:
        """Release every lease and go; the others notice at once. The caller has drained the partitions."""
        await self._keepalive.aclose()
        if self._topic is None:
            await on_private_loop(self._beating.aclose())
            return
        try:
            await asyncio.gather(*(self._attempt(self._release(index)) for index in list(self._leases.held)))
            await self._attempt(self._membership.end(self._topic_name))
        finally:
            await on_private_loop(self._beating.aclose())
            self._metrics.forget()

    async def _attempt(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except QueueError as error:  # leases and membership run out by themselves
            _log.warning("group %r of topic %r: cannot leave: %s", self._group, self._topic_name, error)

    def lose(self, stream: str) -> None:
        """Somebody was told that a lease is gone: forget it and look again."""
        for index, lease in list(self._leases.held.items()):
            if self.topic.stream(self._instance.keys, index) == stream:
                lease.lost = True
                self._forget(index)
                self._metrics.lease_lost(index)
        self.look_again()

    def look_again(self) -> None:
        """Rebalance soon."""
        self._look_at = 0.0
        self._changed.set()

    async def regroup(self, stream: str) -> None:
        """The server says that the group is gone: the lease is released, and taking it again decides."""
        for index in list(self._leases.held):
            if self.topic.stream(self._instance.keys, index) == stream:
                await self._release(index)
        self._gate.forget()
        self.look_again()

    # --- being alive, on the private loop ------------------------------------------------------------------

    async def _beat(self) -> None:
        held = list(self._leases.held.items())
        try:
            await self._membership.beat(self._beating, self._topic_name)
        finally:
            await asyncio.gather(*(self._renew(index, lease) for index, lease in held))

    async def _renew(self, index: int, lease: Lease) -> None:
        if await self._leases.renew(self._beating, index, lease):
            self._metrics.fenced(index, "renew", 1)
            stream = self.topic.stream(self._instance.keys, index)
            self._loop.call_soon_threadsafe(self._lost, index, lease, stream)

    def _lost(self, index: int, lease: Lease, stream: str) -> None:
        if self._leases.held.get(index) is lease:
            _log.warning("group %r: lost the lease of %r", self._group, stream)
            self.lose(stream)

    # --- who owns what ------------------------------------------------------------------------------------

    async def _is_restless(self) -> bool:
        self._changed.clear()
        if self._instance.clock.monotonic() >= self._look_at:
            return True
        return await self._membership.has_changed(self._topic_name)

    async def _rebalance(self) -> None:
        topic = await self._current_topic()
        now, seats = await self._membership.renew(topic.name)
        look = await self._leases.owners(topic, now)
        owners, self._resets = look.members, look.resets
        target = assign(range(topic.partitions), seats, owners)
        wanted = {index for index, member in target.items() if member == self._me}
        before = set(self._leases.held)
        for index in before - wanted:
            self._hand_over(index)
        # What is its own without its knowing was given, or given back, in a call whose answer never came.
        mine = {index for index, owner in owners.items() if owner == self._me}
        free = sorted((wanted - owners.keys() | mine) - before - self._draining.keys())
        gated = await self._heed_growth(topic, free)
        asked = [index for index in free if index not in gated]
        # To its end, also if it is left meanwhile: nobody releases what was given in a call that was torn off.
        await to_its_end(self._acquire_all(topic, asked), "acquire")
        if set(self._leases.held) != before:
            self._metrics.rebalanced()
            self._metrics.owned(len(self._leases.held))
        unsettled = any(index not in self._leases.held or index not in wanted for index in asked)
        pause = _GLANCE if gated or unsettled or self._limits else self._pause(topic, look.next_look)
        self._look_at = self._instance.clock.monotonic() + pause

    async def _current_topic(self) -> Topic:
        """The topic as it is; made again as it was if the server forgot everything."""
        if self.topic.legacy:
            return self.topic
        found = await self._registry.fetch_or_none(self.topic.name)
        if found is None or found.legacy:
            if await self._membership.was_deleted(self._topic_name):
                raise UnknownTopicError(f"topic {self._topic_name!r} was deleted")
            found = await self._registry.restore(self.topic)
            await self._ensure_group(found, "0-0")
        found = await self._grown(await self._heed_spark(found))
        if found.partitions > self.topic.partitions:
            _log.info("topic %r grew to %d partitions", found.name, found.partitions)
        self._topic = found
        return found

    async def _grown(self, topic: Topic) -> Topic:
        """The topic, with a growth completed whose author is not heard of any more."""
        if topic.next_count is None or self._instance.clock.monotonic() <= topic.switch_at + growth.OVERDUE:
            return topic
        await growth.finish_growth(self._instance, self._registry, topic)
        return await self._registry.fetch(topic.name)

    async def _heed_spark(self, topic: Topic) -> Topic:
        """The topic, unless its meta says that the group is a Spark query's.

        Whoever wants to make it one looks for members first. So a member that was one before it was looked for goes
        on, and one that has just joined waits for the outcome, which may be either.
        """
        if not self._is_established:
            topic = await settled(self._instance, self._registry, topic, self._group)
        refuse_spark(topic, self._group)
        self._is_established = True
        return topic

    async def _acquire_all(self, topic: Topic, indexes: Iterable[int]) -> None:
        asked = (self._acquire(topic, index) for index in indexes)
        for result in await asyncio.gather(*asked, return_exceptions=True):
            if result is not None:
                raise result

    async def _acquire(self, topic: Topic, index: int) -> None:
        acquired = await self._leases.acquire(topic, index, self._limits.get(index))
        if acquired is not None:
            self._crew.add(acquired)

    def _hand_over(self, index: int) -> None:
        if index not in self._draining:
            self._draining[index] = self._start(self._drain(index), "hand-over")

    async def _drain(self, index: int) -> None:
        try:
            await self._crew.drain(self.topic.stream(self._instance.keys, index))
            await self._release(index)
            await growth.call_members(self._instance, self._topic_name, self._group)
        except QueueError as error:
            _log.warning("group %r: could not hand partition %d over: %s", self._group, index, error)
        finally:
            self._draining.pop(index, None)
            self.look_again()

    async def _release(self, index: int) -> None:
        lease = self._leases.held.get(index)
        if lease is None:
            return
        stream = self.topic.stream(self._instance.keys, index)
        self._forget(index)  # first: a renewal that comes later must not find it lost
        if not await self._leases.release(stream, lease):
            self._metrics.fenced(index, "release", 1)

    def _forget(self, index: int) -> None:
        self._leases.held.pop(index, None)
        self._crew.drop(self.topic.stream(self._instance.keys, index))
        self._metrics.owned(len(self._leases.held))

    def _pause(self, topic: Topic, next_look: float) -> float:
        pause = min(next_look, self._options.lease_ttl / 3)
        if topic.next_count is not None:
            pause = min(pause, topic.switch_at - HOLD - self._instance.clock.monotonic())
        return max(pause, 0.05)

    async def _heed_growth(self, topic: Topic, free: Iterable[int]) -> list[int]:
        """Read no further than the order of keys allows; those of ``free`` that must not be read at all yet."""
        if not self._options.order_across_growth:
            return []
        self._limits, closed = await self._gate.look(topic, self._resets)
        # What was taken before the group was set back is kept, and nothing is taken from it.
        self._limits |= dict.fromkeys(closed & self._leases.held.keys(), "0-0")
        for index in self._leases.held:
            self._crew.limit(topic.stream(self._instance.keys, index), self._limits.get(index))
        return [index for index in free if index in closed]

    # --- the group itself -----------------------------------------------------------------------------------

    async def _ensure_group(self, topic: Topic, start: str | None = None) -> None:
        """Make sure that the group is on every partition: from now on it misses nothing."""
        start = self._options.start_id if start is None else start
        found = await found_group(self._instance, self._registry, topic, self._group, start)
        self._leases.known = set(range(found.span))

    @property
    def _topic_name(self) -> str:
        return self.topic.name
