"""Which topics there are and how each is divided; cached, and refreshed often enough that growth is noticed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from conquiet.errors import ConfigError, QueueError, UnknownTopicError
from conquiet.kit import codec, rules
from conquiet.kit.recent import Recent
from conquiet.topics.format.partitioner import NAMED
from conquiet.topics.options import Retention, TopicDefaults
from conquiet.topics.server.instance import Instance
from conquiet.wire.connections import is_for_want_of_memory
from conquiet.wire.keys import Keys, name
from conquiet.wire.scripts import Script

__all__ = ["FRESH", "Growth", "LegacyTopic", "Registry", "Topic", "TopicLike", "checked_topic"]

_log = logging.getLogger("conquiet.topics")

FRESH: Final = 1.0
"""For how many seconds a producer goes by what it knows of a topic. Growth waits longer than that."""

_KEPT: Final = 10_000
"""Topics of which something is remembered; a client that uses more asks the server more often."""

_CREATE: Final = Script.named("topic_create")
_LOOK: Final = Script.named("topic_look")
_GROUP: Final = b"group:"
"""How fields of the meta begin that tell whose a group is."""


@dataclass(frozen=True, slots=True)
class LegacyTopic:
    """A stream as it is, under any key, as a topic of one partition with entries of the one field ``data``."""

    stream: str

    def __post_init__(self) -> None:
        rules.text("stream", self.stream)
        Keys().lease(self.stream, "")  # refuses a key that no other can be put beside


TopicLike: TypeAlias = str | LegacyTopic


def checked_topic(topic: object) -> TopicLike:
    """``topic`` if it can name one."""
    return topic if isinstance(topic, LegacyTopic) else name("topic", topic)


@dataclass(frozen=True, slots=True)
class Growth:
    """One step from fewer partitions to more: how many there were, and where each ended."""

    before: int
    after: int
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    """What is known of one topic. From ``switch_at`` on, by local time, writers wait for ``next_count`` partitions."""

    name: str
    partitions: int
    version: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    partitioner: str = "murmur2"
    retention: Retention = field(default_factory=Retention)
    growth: tuple[Growth, ...] = ()
    next_count: int | None = None
    switch_at: float = 0.0
    switch_ms: int = 0
    """The same by the server's time."""
    legacy: bool = False
    spark_groups: frozenset[str] = frozenset()
    """The groups of Spark queries, which no consumer can subscribe to."""
    claimed_groups: frozenset[str] = frozenset()
    """Groups that a Spark query is about to adopt."""

    @property
    def span(self) -> int:
        """How many partitions it has, with those of a growth that is announced."""
        return max(self.partitions, self.next_count or 0)

    def check_partition(self, index: object) -> int:
        """``index`` if it is a partition of this topic; else ``ConfigError``."""
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.partitions:
            raise ConfigError(f"a partition of {self.name!r} must be from 0 to {self.partitions - 1}, not {index!r}")
        return index

    def stream(self, keys: Keys, partition: int) -> str:
        """The key of a partition."""
        return self.name if self.legacy else keys.partition(self.name, partition)

    def streams(self, keys: Keys) -> list[str]:
        """The keys of all partitions."""
        return [self.stream(keys, index) for index in range(self.partitions)]


class Registry:
    """The topics of one instance."""

    def __init__(self, instance: Instance, auto_create: TopicDefaults | None = None) -> None:
        self._instance = instance
        self._auto_create = auto_create
        self._known = Recent[TopicLike, tuple[float, Topic]](_KEPT)
        self._registered = Recent[str, int](_KEPT)

    async def fresh(self, topic: TopicLike) -> Topic:
        """The topic as it was at most a second ago; ``UnknownTopicError`` if there is none."""
        checked_topic(topic)
        known = self._known.get(topic)
        now = self._instance.clock.monotonic()
        if known is not None and now < known[0]:
            return known[1]
        found = await self.fetch(topic)
        self._known.keep(topic, (now + FRESH, found))
        return found

    def cached(self, topic: TopicLike) -> Topic | None:
        """As :meth:`fresh`, if that needs no question to the server."""
        try:
            known = self._known.get(topic)
        except TypeError:  # not even hashable
            checked_topic(topic)
            raise
        return known[1] if known is not None and self._instance.clock.monotonic() < known[0] else None

    async def fetch(self, topic: TopicLike) -> Topic:
        """The topic as it is now, listed; made if there is none and the broker makes topics."""
        try:
            found = await self.existing(topic)
        except UnknownTopicError:
            if self._auto_create is None or isinstance(topic, LegacyTopic):
                raise
            defaults = self._auto_create
            return await self.create(topic, defaults.partitions, defaults.retention, defaults.partitioner)
        if not found.legacy:
            await self.enlist(found)
        return found

    async def existing(self, topic: TopicLike) -> Topic:
        """The topic as it is now; ``UnknownTopicError`` if there is none. No side effect."""
        found = (
            Topic(topic.stream, 1, legacy=True) if isinstance(topic, LegacyTopic) else await self.fetch_or_none(topic)
        )
        if found is None:
            raise UnknownTopicError(f"there is no topic {topic!r}: create_topic makes one")
        return found

    async def fetch_or_none(self, topic: str) -> Topic | None:
        """The topic, or the legacy stream of that name; ``None`` if there is neither. No side effect."""
        name("topic", topic)
        key = self._instance.keys.meta(topic)
        asked = self._instance.clock.monotonic()
        now, *meta = await self._instance.run(key, _LOOK([key], self._instance.clock.offset_ms))
        if meta:
            return _topic_of(topic, meta, int(now), asked)
        bare = self._instance.keys.bare(topic)
        kind = await self._instance.ask("TYPE", bare)
        return Topic(bare, 1, legacy=True) if kind == b"stream" else None

    async def create(self, topic: str, partitions: int, retention: Retention, partitioner: str = "murmur2") -> Topic:
        """Make a topic, or find it as it is asked for; ``ConfigError`` if it exists otherwise."""
        rules.integer("partitions", partitions, least=1)
        rules.one_of("partitioner", partitioner, tuple(NAMED))
        wanted = Topic(name("topic", topic), partitions, partitioner=partitioner, retention=retention)
        found = await self._create(wanted)
        for what in ("partitions", "partitioner", "retention"):
            was, asked = getattr(found, what), getattr(wanted, what)
            if was != asked:
                change = "admin.grow and admin.configure change it"
                raise ConfigError(f"topic {topic!r} exists with {what}={was!r}, not {asked!r}: {change}")
        return found

    async def restore(self, topic: Topic) -> Topic:
        """Make a topic again as it was, on a server that forgot everything, or find it made again already."""
        return await self._create(topic)

    async def _create(self, topic: Topic) -> Topic:
        key, clock = self._instance.keys.meta(topic.name), self._instance.clock
        policies = codec.encode({"retention": topic.retention.plain()})
        since = topic.created_ms or ""
        asked = clock.monotonic()
        spark = sorted(topic.spark_groups)
        call = _CREATE([key], clock.offset_ms, topic.partitions, topic.partitioner, policies, since, *spark)
        now, *meta = await self._instance.run(key, call)
        self.forget(topic.name)
        found = _topic_of(topic.name, meta, int(now), asked)
        await self.enlist(found)
        return found

    def forget(self, topic: str) -> None:
        """Ask the server the next time."""
        self._known.pop(topic, None)
        self._registered.pop(topic, None)

    async def names(self) -> list[str]:
        """All topics, sorted."""
        return sorted(member.decode() for member in await self._instance.ask("SMEMBERS", self._instance.keys.registry))

    async def enlist(self, topic: Topic) -> None:
        """List a topic and its streams; if the server has no memory for that, the next client that finds it does."""
        # The meta makes the topic; these two only list it, so that a crash between them does no harm.
        if self._registered.get(topic.name) == topic.partitions:
            return
        try:
            await self._enlist(topic)
        except QueueError as error:
            if not is_for_want_of_memory(error):
                raise
            _log.warning("topic %r is not listed yet: %s", topic.name, error)
        else:
            self._registered.keep(topic.name, topic.partitions)

    async def _enlist(self, topic: Topic) -> None:
        instance, listed = self._instance, self._instance.keys.partitions(topic.name)
        await instance.enlist(instance.keys.registry, topic.name)
        if await instance.ask("SCARD", listed) != topic.partitions:
            await instance.ask("SADD", listed, *topic.streams(instance.keys))


def _topic_of(topic: str, meta: list[bytes], now: int, asked: float) -> Topic:
    """The topic that its meta describes; ``now`` is the server's time at the local time ``asked``."""
    fields = dict(zip(meta[::2], meta[1::2], strict=True))
    try:
        return _read(topic, fields, now, asked)
    except (AttributeError, KeyError, TypeError, *codec.UNREADABLE) as error:
        raise QueueError(f"the meta of topic {topic!r} cannot be read: {error!r}") from error


def _read(topic: str, fields: Mapping[bytes, bytes], now: int, asked: float) -> Topic:
    policies = codec.decode(fields.get(b"policies", b"{}"))
    growth = codec.decode(fields.get(b"growth", b"[]"))
    effective = fields.get(b"effectiveAt")
    planned = fields.get(b"nextCount")
    marks = {key[len(_GROUP) :].decode(): mark.decode() for key, mark in fields.items() if key.startswith(_GROUP)}
    return Topic(
        topic,
        _count(fields[b"partitionCount"]),
        int(fields.get(b"version", b"1")),
        int(fields.get(b"createdAt", b"0")),
        int(fields.get(b"updatedAt", b"0")),
        fields.get(b"partitioner", b"murmur2").decode(),
        Retention.from_plain(policies.get("retention", {})),
        tuple(Growth(step["before"], step["after"], tuple(step["ends"])) for step in growth),
        None if planned is None else _count(planned),
        asked + (int(effective) - now) / 1000 if effective is not None else 0.0,
        int(effective or 0),
        spark_groups=frozenset(group for group, mark in marks.items() if mark == "spark"),
        claimed_groups=frozenset(group for group, mark in marks.items() if _claimed_until(mark) > now),
    )


def _claimed_until(mark: str) -> int:
    what, _, rest = mark.partition(":")
    return int(rest.partition(":")[0]) if what == "claim" else 0


def _count(value: bytes) -> int:
    return rules.integer("partitionCount", int(value), least=1)
