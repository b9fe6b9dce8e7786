"""One member of a group: it joins, owns its share of a topic's partitions, rebalances and leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from conquiet.errors import ConfigError, QueueError, UnknownTopicError
from conquiet.kit.holding import TAKEN
from conquiet.kit.service import to_its_end
from conquiet.metrics import GroupMetrics
from conquiet.topics.consume.assignment import Seat, assign
from conquiet.topics.consume.engine import Engine
from conquiet.topics.consume.growth_limits import HOLD, GrowthLimits
from conquiet.topics.consume.partition_leases import Acquired, PartitionLeases
from conquiet.topics.server import growth
from conquiet.topics.server.external_groups import refuse_spark, settled
from conquiet.topics.server.group import found_group
from conquiet.topics.server.members import Identity, Members
from conquiet.topics.server.topics import Topic, TopicLike

__all__ = ["Member"]

_log = logging.getLogger("conquiet.topics")

_SOON: Final = 0.25
"""Seconds after which a member looks again that waits for something that nobody tells of."""
_AT_LIMIT: Final = 0.5
"""Seconds after which it looks again whether it may read on after a growth."""
_LEAST: Final = 0.05


class Member:
    """Keeps one consumer in one group of one topic.

    All members compute the same assignment from what they see in Redis. A member that owns too much finishes what it
    handles and releases it, unless it is to have it again before that; no member takes what another still holds.
    ``start`` runs hand-overs beside it; ``changed`` is set when it has to look again.
    """

    def __init__(
        self,
        who: Identity,
        topic: TopicLike,
        calls: Members,
        leases: PartitionLeases,
        crew: Engine,
        metrics: GroupMetrics,
        start: Callable[[Any, str], asyncio.Task[None]],
        changed: asyncio.Event,
    ) -> None:
        self._instance, self._registry = who.instance, who.registry
        self._group, self._me, self._options = who.group, who.me, who.options
        self._name = topic
        self._calls = calls
        self._leases = leases
        self._crew = crew
        self._metrics = metrics
        self._start = start
        self._changed = changed
        self._topic: Topic | None = None
        self._draining: dict[int, asyncio.Task[None]] = {}
        self._growth = GrowthLimits(who.instance, who.group, is_strict=who.options.order != "unordered")
        self._limits: dict[int, str] = {}
        self._known: set[int] = set()
        """The partitions on which the group is known to have been."""
        self._generation = b""
        self.since = 0
        """The server's time at which it joined, in milliseconds; 0 until it has."""
        self._look_at = 0.0
        self._is_established = self._is_over = self._is_told = False
        self.is_idle = False
        """Whether it has joined, and is not rebalancing."""

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
        return sorted(self._held())

    def _held(self) -> dict[int, Acquired]:
        streams = self.topic.streams(self._instance.keys)
        return {index: held for index, stream in enumerate(streams) if (held := self._leases.get(stream)) is not None}

    # --- from joining to leaving ------------------------------------------------------------------------

    async def join(self) -> None:
        """Make sure that topic and group exist, become a member and take what is free."""
        topic = await self._grown(await self._registry.fetch(self._name))
        refuse_spark(topic, self._group)
        self._topic = topic
        if topic.legacy and self._options.retry.mode == "requeue":
            raise ConfigError("a legacy stream cannot carry requeued messages: retry there with mode='park'")
        await self._ensure_group(topic)
        self.since = (await self._calls.renew(topic.name)).now
        await self.rebalance()
        self.is_idle = True

    def lost(self, acquired: Acquired, reason: str) -> None:
        """Another consumer has a partition: forget it, and look again."""
        _log.warning("group %r: lost the lease of %r: %s", self._group, acquired.stream, reason)
        acquired.lease.lost = True
        if reason == TAKEN:
            self._metrics.fenced(acquired.index, "renew", 1)
        self._metrics.lease_lost(acquired.index)
        self._forget(acquired)
        self.look_again()

    def look_again(self) -> None:
        """Rebalance soon, and once more if that is under way."""
        self._look_at, self._is_told = 0.0, True
        self._changed.set()

    async def regroup(self, acquired: Acquired) -> None:
        """The server says that the group is gone: the lease is released, and taking it again decides."""
        await self.release([acquired])
        self._growth.forget()
        self.look_again()

    async def release(self, given: Sequence[Acquired]) -> None:
        """Give partitions up that were drained."""
        for one in given:
            self._leases.drop(one)  # first: a renewal that comes later must not find it lost
            self._forget(one)
        for one in await self._leases.release(given):
            self._metrics.fenced(one.index, "release", 1)

    def _forget(self, acquired: Acquired) -> None:
        self._crew.drop(acquired.stream)
        self._metrics.owned(len(self._held()))

    async def leave(self, busy: Collection[str]) -> None:
        """Give all partitions up, but those of the streams in ``busy``: their leases run out."""
        await self.release([held for held in self._held().values() if held.stream not in busy])

    def close(self) -> None:
        """Own nothing more."""
        self._is_over = True

    # --- who owns what ------------------------------------------------------------------------------------

    def is_restless(self, generation: bytes) -> bool:
        """Whether it is to rebalance: it is time, or a member came, went or gave a partition up."""
        return generation != self._generation or self._instance.clock.monotonic() >= self._look_at

    async def rebalance(self) -> None:
        """Look at the group: hand over what is others', and take what is free."""
        self._look_at, self._is_told = 0.0, False  # if it fails, it is tried again
        topic = await self._current_topic()
        gathering = await self._calls.renew(topic.name)
        self._generation = gathering.generation
        owners = await self._leases.owners(topic, gathering.now)
        target = assign(range(topic.partitions), _seats(gathering.members), owners.members)
        wanted = {index for index, member in target.items() if member == self._me}
        held = self._held()
        self._hand_over({index: one for index, one in held.items() if index not in wanted}, held)
        # What is its own without its knowing was given, or given back, in a call whose answer never came.
        mine = {index for index, owner in owners.members.items() if owner == self._me}
        free = sorted((wanted - owners.members.keys() | mine) - held.keys() - self._draining.keys())
        closed = await self._heed_growth(topic, owners.resets)
        asked = [index for index in free if index not in closed]
        # To its end, also if it is left meanwhile: nobody releases what was given in a call that was torn off.
        await to_its_end(self._acquire(topic, asked), "acquire")
        now_held = self._held()
        if now_held.keys() != held.keys():
            _log.info("consumer %r owns %s of topic %r", self._me, sorted(now_held) or "nothing", topic.name)
            self._metrics.rebalanced()
            self._metrics.owned(len(now_held))
        is_settled = all(index in now_held and index in wanted for index in asked)
        pause = self._pause(topic, owners.next_look) if is_settled else _SOON
        self._look_at = 0.0 if self._is_told else self._instance.clock.monotonic() + pause

    async def _current_topic(self) -> Topic:
        """The topic as it is; made again as it was if the server forgot everything."""
        if self.topic.legacy:
            return self.topic
        found = await self._registry.fetch_or_none(self.topic.name)
        if found is None or found.legacy:
            if await self._calls.was_deleted(self.topic.name):
                raise UnknownTopicError(f"topic {self.topic.name!r} was deleted")
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

        To become one a query looks for members first. So a member that was one before it was looked for goes on, and
        one that has just joined waits for the outcome, which may be either.
        """
        if not self._is_established:
            topic = await settled(self._instance, self._registry, topic, self._group)
        refuse_spark(topic, self._group)
        self._is_established = True
        return topic

    async def _acquire(self, topic: Topic, indexes: Sequence[int]) -> None:
        taken = await self._leases.acquire(topic, indexes, self._known, self.since, self._limits)
        if self._is_over:  # the answer came so late that it was not waited for
            await self.release(taken)
            return
        for one in taken:
            self._known.add(one.index)
            self._crew.add(one)

    def _hand_over(self, surplus: Mapping[int, Acquired], held: Mapping[int, Acquired]) -> None:
        for index in surplus.keys() - self._draining.keys():
            self._draining[index] = self._start(self._give(surplus[index]), "hand-over")
        # What is wanted here again, and not released yet, stays.
        for index in self._draining.keys() & held.keys() - surplus.keys():
            self._draining.pop(index).cancel()
            self._crew.keep(held[index].stream)

    async def _give(self, acquired: Acquired) -> None:
        try:
            await self._crew.drain(acquired.stream)
            await self.release([acquired])
            await growth.call_members(self._instance, self.topic.name, self._group)
        except QueueError as error:
            _log.warning("group %r: could not hand partition %d over: %s", self._group, acquired.index, error)
        finally:
            if self._draining.get(acquired.index) is asyncio.current_task():
                del self._draining[acquired.index]
                self.look_again()

    def _pause(self, topic: Topic, next_look: float) -> float:
        hold = topic.switch_at - HOLD - self._instance.clock.monotonic()
        if topic.next_count is not None and hold > 0:
            next_look = min(next_look, hold)
        return max(min(next_look, _AT_LIMIT) if self._limits else next_look, _LEAST)

    async def _heed_growth(self, topic: Topic, resets: Sequence[object]) -> Collection[int]:
        """Read no further than the order of keys allows; the partitions that must not be taken yet."""
        if not self._options.order_across_growth:
            return ()
        self._limits, closed = await self._growth.look(topic, resets)
        held = self._held()
        # What was taken before the group was set back is kept, and nothing is taken from it.
        self._limits |= dict.fromkeys(closed & held.keys(), "0-0")
        for index, one in held.items():
            self._crew.limit(one.stream, self._limits.get(index))
        return closed

    async def _ensure_group(self, topic: Topic, start: str | None = None) -> None:
        """Make sure that the group is on every partition: from now on it misses nothing."""
        start = self._options.start_id if start is None else start
        found = await found_group(self._instance, self._registry, topic, self._group, start)
        self._known = set(range(found.span))


def _seats(members: Mapping[str, Mapping[str, Any]]) -> list[Seat]:
    return [Seat(name, *map(about.get, ("most", "modulo", "remainder"))) for name, about in members.items()]
