"""One consumer's place in a group: who else is there, what it should own, and the leases on what it owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from conquiet.errors import ConfigError, GroupLostError, QueueError, UnknownTopicError
from conquiet.kit import codec
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import on_private_loop
from conquiet.metrics import GroupMetrics
from conquiet.topics import growth
from conquiet.topics.assignment import Seat, assign
from conquiet.topics.gate import HOLD, Gate
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.presence import found_group
from conquiet.topics.progress import refuse_spark, settled, spark_owned
from conquiet.topics.registry import Registry, Topic, TopicLike
from conquiet.topics.site import Site
from conquiet.wire.lease import Lease
from conquiet.wire.link import Link
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script, run, run_many
from conquiet.wire.streams import pack

__all__ = ["Acquired", "Crew", "Member"]

_log = logging.getLogger("conquiet.topics")

_ACQUIRE: Final = Script.named("partition_acquire")
_RELEASE: Final = Script.named("partition_release")
_BEAT: Final = Script.named("member_beat")
_LEAVE: Final = Script.named("member_leave")
_GLANCE: Final = 0.25
"""How often a member looks whether something changed in its group, in seconds: one GET."""
_PATIENCE: Final = 1.0
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


class Crew(Protocol):
    """Whoever works on the partitions that a member owns."""

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
    blocks its own loop costs neither. What to own is computed alike by all members from what they see in Redis;
    whoever owns too much finishes what it handles and releases, and nobody takes what another still holds.
    """

    def __init__(
        self,
        site: Site,
        registry: Registry,
        topic: TopicLike,
        group: str,
        me: str,
        options: SubscribeOptions,
        crew: Crew,
        metrics: GroupMetrics,
    ) -> None:
        self._site = site
        self._registry = registry
        self._name = topic
        self._group = group
        self._me = me
        self._options = options
        self._crew = crew
        self._metrics = metrics
        self._topic: Topic | None = None
        self._leases: dict[int, Lease] = {}
        self._draining: dict[int, asyncio.Task[None]] = {}
        self._known: set[int] = set()
        self._limits: dict[int, str] = {}
        self._resets: list[bytes | None] = []
        self._gate = Gate(site, group)
        self._since = 0
        self._is_established = False
        self._generation = b""
        self._look_at = 0.0
        self._changed = asyncio.Event()
        self._beating = Link(site.link.address)
        self._keepalive = Keepalive(self._beat, options.lease_ttl / 3, site.clock)

    @property
    def topic(self) -> Topic:
        """The topic as this member last saw it."""
        assert self._topic is not None
        return self._topic

    @property
    def owned(self) -> list[int]:
        """The partitions whose leases it holds."""
        return sorted(self._leases)

    # --- from joining to leaving ------------------------------------------------------------------------

    async def join(self) -> None:
        """Make sure that topic and group exist, become a member and take what is free."""
        topic = await self._grown(await self._registry.look(self._name))
        refuse_spark(topic, self._group)
        self._topic = topic
        if self._topic.legacy and self._options.retry.mode == "requeue":
            raise ConfigError("a legacy stream cannot carry requeued messages: retry there with mode='park'")
        await self._ensure_group(self._topic)
        now, _ = await self._say_alive()
        self._since = now
        self._loop = asyncio.get_running_loop()
        await self._keepalive.start()
        await self._rebalance()

    async def run(self, start: Callable[[Any, str], asyncio.Task[None]]) -> None:
        """Follow the group until cancelled, or until it or the topic is gone; ``start`` runs hand-overs beside it."""
        self._start = start
        while True:
            await self._site.clock.wait(self._changed, _GLANCE)
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
            await asyncio.gather(*(self._attempt(self._release(index)) for index in list(self._leases)))
            await self._attempt(self._sign_off())
        finally:
            await on_private_loop(self._beating.aclose())
            self._metrics.forget()

    async def _sign_off(self) -> None:
        keys = self._member_keys()
        await self._insist(keys[0], _LEAVE(keys, self._me))

    async def _attempt(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except QueueError as error:  # leases and membership run out by themselves
            _log.warning("group %r of topic %r: cannot leave: %s", self._group, self._topic_name, error)

    def lose(self, stream: str) -> None:
        """Somebody was told that a lease is gone: forget it and look again."""
        for index, lease in list(self._leases.items()):
            if self.topic.stream(self._site.keys, index) == stream:
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
        for index in list(self._leases):
            if self.topic.stream(self._site.keys, index) == stream:
                await self._release(index)
        self._gate.forget()
        self.look_again()

    # --- being alive, on the private loop ------------------------------------------------------------------

    async def _beat(self) -> None:
        held = list(self._leases.items())
        try:
            await self._say_alive(self._beating)
        finally:
            await asyncio.gather(*(self._renew(index, lease) for index, lease in held))

    async def _renew(self, index: int, lease: Lease) -> None:
        asked = self._site.clock.monotonic()
        [reply] = await run_many(self._beating, lease.key, [lease.renewal(self._site.clock.offset_ms)])
        lease.renewed(reply, asked)
        if isinstance(reply, Exception):
            self._beating.refuse(lease.key, reply)
        if lease.lost and self._leases.get(index) is lease:  # else it was given up, and the question came too late
            self._metrics.fenced(index, "renew", 1)
            stream = self.topic.stream(self._site.keys, index)
            self._loop.call_soon_threadsafe(self._lost, index, lease, stream)

    def _lost(self, index: int, lease: Lease, stream: str) -> None:
        if self._leases.get(index) is lease:
            _log.warning("group %r: lost the lease of %r", self._group, stream)
            self.lose(stream)

    async def _say_alive(self, link: Link | None = None) -> tuple[int, list[Seat]]:
        options = self._options
        modulo, remainder = options.partition_modulo, options.partition_remainder
        ttl = round(options.lease_ttl * 1000)
        info = {"most": options.max_partitions, "modulo": modulo, "remainder": remainder, "ttl_ms": ttl}
        about = codec.encode(info)
        keys = self._member_keys()
        call = _BEAT(keys, self._me, about, ttl, self._site.clock.offset_ms)
        now, generation, *members = await run(link or self._site.link, keys[0], call)
        if link is None:
            self._generation = generation
        return int(now), [_seat(*pair) for pair in zip(members[::2], members[1::2], strict=True)]

    # --- who owns what ------------------------------------------------------------------------------------

    async def _is_restless(self) -> bool:
        self._changed.clear()
        if self._site.clock.monotonic() >= self._look_at:
            return True
        key = self._site.keys.generation(self._topic_name, self._group)
        # One that a deletion left behind runs out though there is a group of that name again.
        generation = await self._site.link.call(key, pack("GET", key)) or b"0"
        return bool(generation != self._generation)

    async def _rebalance(self) -> None:
        topic = await self._current_topic()
        now, seats = await self._say_alive()
        owners, next_look = await self._owners(topic, now)
        target = assign(range(topic.partitions), seats, owners)
        wanted = {index for index, member in target.items() if member == self._me}
        before = set(self._leases)
        for index in before - wanted:
            self._hand_over(index)
        # What is its own without its knowing was given, or given back, in a call whose answer never came.
        mine = {index for index, owner in owners.items() if owner == self._me}
        free = sorted((wanted - owners.keys() | mine) - before - self._draining.keys())
        gated = await self._heed_growth(topic, free)
        asked = [index for index in free if index not in gated]
        await asyncio.gather(*(self._acquire(topic, index) for index in asked))
        if set(self._leases) != before:
            self._metrics.rebalanced()
            self._metrics.owned(len(self._leases))
        unsettled = any(index not in self._leases or index not in wanted for index in asked)
        pause = _GLANCE if gated or unsettled or self._limits else self._pause(topic, next_look)
        self._look_at = self._site.clock.monotonic() + pause

    async def _current_topic(self) -> Topic:
        """The topic as it is; made again as it was if the server forgot everything."""
        if self.topic.legacy:
            return self.topic
        found = await self._registry.look_up(self.topic.name)
        if found is None or found.legacy:
            key = self._site.keys.generation(self._topic_name, self._group)
            if await self._site.link.call(key, pack("PTTL", key)) > 0:  # see delete_topic
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
        if topic.next_count is None or self._site.clock.monotonic() <= topic.switch_at + growth.OVERDUE:
            return topic
        await growth.finish_growth(self._site, self._registry, topic)
        return await self._registry.look(topic.name)

    async def _heed_spark(self, topic: Topic) -> Topic:
        """The topic, unless its meta says that the group is a Spark query's.

        Whoever wants to make it one looks for members first. So a member that was one before it was looked for goes
        on, and one that has just joined waits for the outcome, which may be either.
        """
        if not self._is_established:
            topic = await settled(self._site, self._registry, topic, self._group)
        refuse_spark(topic, self._group)
        self._is_established = True
        return topic

    async def _owners(self, topic: Topic, now: int) -> tuple[dict[int, str], float]:
        """Who holds each partition now, and in how many seconds the first of these leases can run out."""
        leases = [self._lease_key(topic, index) for index in range(topic.partitions)]
        asked = (self._site.link.call(key, pack("HMGET", key, "owner", "until_ms", "resets")) for key in leases)
        replies = await asyncio.gather(*asked)
        self._resets = [resets for _, _, resets in replies]
        owners: dict[int, str] = {}
        first = self._options.lease_ttl
        for index, (owner, until, _) in enumerate(replies):
            if owner and int(float(until)) > now:
                owners[index] = owner.decode()
                if index not in self._leases:
                    first = min(first, (int(float(until)) - now) / 1000 + 0.02)
        return owners, first

    async def _acquire(self, topic: Topic, index: int) -> None:
        stream = topic.stream(self._site.keys, index)
        key, options, clock = self._lease_key(topic, index), self._options, self._site.clock
        known = "1" if index in self._known else "0"
        lost = _LOST[options.on_group_lost]
        ttl = round(options.lease_ttl * 1000)
        asked = clock.monotonic()
        call = _ACQUIRE([key, stream], self._me, ttl, clock.offset_ms, self._group, "0-0", self._since, known, lost)
        try:
            status, *rest = await self._site.run(stream, call)
        except QueueError as error:  # one bad partition does not stop the others
            _log.error("group %r: cannot take %r: %s", self._group, stream, error)
            return
        if status == b"OK":
            self._known.add(index)
            self._begin(topic, index, stream, rest, asked)
        elif status == b"SPARK":
            raise spark_owned(topic, self._group)
        elif status == b"DELETED":
            raise GroupLostError(f"group {self._group!r} of topic {topic.name!r} was deleted")
        elif status == b"NOGROUP":
            raise GroupLostError(f"group {self._group!r} is gone from {stream!r}, and where it stood is not known")

    def _begin(self, topic: Topic, index: int, stream: str, reply: Iterable[Reply], asked: float) -> None:
        epoch, crashed, running, last = (part.decode() for part in reply)
        lease = Lease.acquired(self._lease_key(topic, index), self._me, int(epoch), self._options.lease_ttl, asked)
        self._leases[index] = lease
        self._crew.add(Acquired(topic, index, stream, lease, crashed, running, last, self._limits.get(index)))

    def _hand_over(self, index: int) -> None:
        if index not in self._draining:
            self._draining[index] = self._start(self._drain(index), "hand-over")

    async def _drain(self, index: int) -> None:
        try:
            await self._crew.drain(self.topic.stream(self._site.keys, index))
            await self._release(index)
            key = self._site.keys.generation(self._topic_name, self._group)
            await self._site.link.call(key, pack("INCR", key))
        except QueueError as error:
            _log.warning("group %r: could not hand partition %d over: %s", self._group, index, error)
        finally:
            self._draining.pop(index, None)
            self.look_again()

    async def _release(self, index: int) -> None:
        lease = self._leases.get(index)
        if lease is None:
            return
        stream = self.topic.stream(self._site.keys, index)
        self._forget(index)  # first: a renewal that comes later must not find it lost
        call = _RELEASE([lease.key, stream], lease.owner, lease.epoch, self._group)
        if await self._insist(stream, call) == 0:
            self._metrics.fenced(index, "release", 1)

    async def _insist(self, key: str, call: Call) -> Reply:
        """The reply to a call that can be repeated, tried again for a moment if there is none."""
        until = self._site.clock.monotonic() + _PATIENCE
        while True:
            try:
                return await self._site.run(key, call)
            except QueueError:
                if self._site.clock.monotonic() >= until:
                    raise
                await self._site.clock.sleep(_PATIENCE / 5)

    def _forget(self, index: int) -> None:
        self._leases.pop(index, None)
        self._crew.drop(self.topic.stream(self._site.keys, index))
        self._metrics.owned(len(self._leases))

    def _pause(self, topic: Topic, next_look: float) -> float:
        pause = min(next_look, self._options.lease_ttl / 3)
        if topic.next_count is not None:
            pause = min(pause, topic.switch_at - HOLD - self._site.clock.monotonic())
        return max(pause, 0.05)

    async def _heed_growth(self, topic: Topic, free: Iterable[int]) -> list[int]:
        """Read no further than the order of keys allows; those of ``free`` that must not be read at all yet."""
        if not self._options.order_across_growth:
            return []
        self._limits, closed = await self._gate.look(topic, self._resets)
        # What was taken before the group was set back is kept, and nothing is taken from it.
        self._limits |= dict.fromkeys(closed & self._leases.keys(), "0-0")
        for index in self._leases:
            self._crew.limit(topic.stream(self._site.keys, index), self._limits.get(index))
        return [index for index in free if index in closed]

    # --- the group itself -----------------------------------------------------------------------------------

    async def _ensure_group(self, topic: Topic, start: str | None = None) -> None:
        """Make sure that the group is on every partition: from now on it misses nothing."""
        start = self._options.start_id if start is None else start
        found = await found_group(self._site, self._registry, topic, self._group, start)
        self._known = set(range(found.span))

    @property
    def _topic_name(self) -> str:
        return self.topic.name

    def _member_keys(self) -> list[str]:
        keys, names = self._site.keys, (self._topic_name, self._group)
        return [keys.members(*names), keys.members_info(*names), keys.generation(*names)]

    def _lease_key(self, topic: Topic, index: int) -> str:
        return self._site.keys.lease(topic.stream(self._site.keys, index), self._group)


def _seat(member: bytes, about: bytes) -> Seat:
    info = codec.decode(about)
    return Seat(member.decode(), info.get("most"), info.get("modulo"), info.get("remainder"))
