"""The way into topics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.kit.lifecycle import Life
from conquiet.kit.options import instance, takes
from conquiet.message import EntryId, Outgoing
from conquiet.metrics import TopicsCollector
from conquiet.topics.consume.handling import BatchHandler, Handler
from conquiet.topics.consume.subscription import Messages, Subscription
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.collector import Collector
from conquiet.topics.options import BrokerKeywords, BrokerOptions, Retention, SubscribeOptions
from conquiet.topics.produce.producer import Producer
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import LegacyTopic, Registry, TopicLike, checked_topic
from conquiet.wire.address import Address, AddressLike
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys, name
from conquiet.wire.streams import pack

__all__ = ["Broker"]

_log = logging.getLogger("conquiet.topics")
_C = TypeVar("_C", bound=Subscription | Messages)


class Broker:
    """Topics at one Redis: create them, send to them, consume them, look after them.

    ``client`` is a URL, an address, or a ``redis.asyncio`` client (standalone, Sentinel or Cluster) of which only
    the settings are used. ``namespace`` keeps instances apart that share a server; ``partitioner`` replaces the one
    that a topic was created with; ``auto_create`` makes unknown topics on first use.
    """

    @takes(BrokerOptions)
    def __init__(self, client: AddressLike, **options: Unpack[BrokerKeywords]) -> None:
        taken = BrokerOptions(**options)
        self._instance = Instance(Connections(Address.of(client)), Keys(taken.namespace), taken.clock)
        self._codec = taken.codec
        self._registry = Registry(self._instance, taken.auto_create)
        self._producer = Producer(self._instance, self._registry, taken)
        self._admin = Admin(self._instance, self._registry, self._codec)
        self._consumers: WeakSet[Subscription | Messages] = WeakSet()
        self._life = Life(f"the broker at {self._instance.link.address}", _log)

    @classmethod
    @takes(BrokerOptions)
    def connect(cls, url: str, **options: Unpack[BrokerKeywords]) -> Self:
        """A broker at ``url``; ``async with`` checks that the server answers and closes everything at the end."""
        return cls(url, **options)

    @property
    def admin(self) -> Admin:
        """Looking at topics and groups, and changing them."""
        return self._admin

    def collector(self, topics: Sequence[str] | None = None, *, most_partitions: int = 1000) -> TopicsCollector:
        """Show what only Redis knows (lengths, lag, pending, owners) to Prometheus' default registry from now on.

        Of ``topics``, or of all; no more than ``most_partitions`` are looked at for one scrape. ``close`` ends it.
        """
        rules.integer("most_partitions", most_partitions, least=1)
        names = None if topics is None else [name("topic", topic) for topic in topics]
        return Collector(self._instance, names, most_partitions)

    async def open(self) -> None:
        """Check that the server answers."""
        key = self._instance.keys.registry
        await self._instance.link.call(key, pack("SCARD", key))

    async def aclose(self) -> None:
        """Stop and leave with every consumer that is still there, all at once, then close the connections.

        Takes the longest ``drain_timeout`` of them plus a second at most, and is done also when this is cancelled.
        """
        consumers = list(self._consumers)
        seconds = max((consumer._drain_time for consumer in consumers), default=0.0)
        await self._life.leave(partial(self._leave, consumers), self._instance.link.aclose, seconds)

    async def _leave(self, consumers: Iterable[Subscription | Messages]) -> None:
        await asyncio.gather(*(consumer.aclose() for consumer in consumers))

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 1,
        retention: Retention | None = None,
        partitioner: str = "murmur2",
        adopt: bool = False,
    ) -> None:
        """Make a topic; nothing happens if it exists as asked for, ``ConfigError`` if it exists otherwise.

        Where a plain stream lies under that name, readers of it would not see the new topic's messages: that is
        refused unless ``adopt`` says that it is meant. The stream stays, and ``legacy`` reads it.
        """
        retention = Retention() if retention is None else retention
        instance("retention", retention, of=Retention)
        if not adopt:
            found = await self._registry.fetch_or_none(topic)
            if found is not None and found.legacy:
                raise ConfigError(f"{topic!r} is a stream already: adopt=True makes a topic of that name beside it")
        await self._registry.create(topic, partitions, retention, partitioner)

    def legacy(self, stream: str) -> LegacyTopic:
        """The stream under any key as a topic of one partition, in the format of ``RedisStreamsQueue``."""
        return LegacyTopic(stream)

    async def send(
        self,
        topic: TopicLike,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        max_retries: int | None = None,
        partition: int | None = None,
        delay: float | None = None,
    ) -> EntryId:
        """Append a message; its ID, once Redis has it.

        Messages of one ``key`` keep their order. ``message_id`` makes a repeated send harmless: within the window
        of the broker it gives the ID of the first one. ``delay`` holds it back for so many seconds. After a
        ``QueueError`` of a lost connection the message may or may not be there; it is there at most once.
        """
        message = Outgoing(payload, key, headers, message_id, max_retries, partition)
        return await self._producer.send(topic, message, delay)

    async def send_batch(self, topic: TopicLike, messages: Iterable[Outgoing]) -> list[EntryId]:
        """Append messages, one round trip for each few hundred of a partition; their IDs.

        All are checked before the first is sent, and those of one partition keep their order. It is not one
        transaction: when Redis fails on the way the ``QueueError`` says in ``entry_ids`` which were written.
        """
        return await self._producer.send_batch(topic, messages)

    def subscribe(
        self,
        topic: TopicLike | Sequence[TopicLike],
        *,
        group: str,
        handler: Handler | BatchHandler,
        options: SubscribeOptions | None = None,
    ) -> Subscription:
        """A consumer that calls ``handler`` for each message of one or more topics; ``async with`` starts it.

        A handler that cannot be called with a message is refused here, with ``ConfigError``.
        """
        return self._consumer(Subscription, topic, group, options, handler=handler)

    def consume(
        self,
        topic: TopicLike | Sequence[TopicLike],
        *,
        group: str,
        options: SubscribeOptions | None = None,
    ) -> Messages:
        """A consumer to pull messages from; ``async with`` starts it."""
        return self._consumer(Messages, topic, group, options)

    def _consumer(
        self,
        kind: Callable[..., _C],
        topic: TopicLike | Sequence[TopicLike],
        group: str,
        options: SubscribeOptions | None,
        **more: Any,
    ) -> _C:
        topics = [topic] if isinstance(topic, str | LegacyTopic) else topic
        if not isinstance(topics, Sequence):
            raise ConfigError(f"topic must be a name, a legacy stream or a sequence of these, not {topic!r}")
        topics = [checked_topic(one) for one in topics]
        options = SubscribeOptions() if options is None else options
        instance("options", options, of=SubscribeOptions)
        found = kind(self._instance, self._registry, self._codec, topics, group, options, **more)
        self._consumers.add(found)
        return found
