"""The same API without ``await``: same names, same arguments, ``with`` and ``for`` for their async forms.

The core runs on one private event loop in a daemon thread, started by the first call. Objects may be shared
by threads, survive ``fork`` and can be pickled. A handler is a plain function and runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import conquiet as core
from conquiet import Address as Address
from conquiet import AlreadyClaimedError as AlreadyClaimedError
from conquiet import Attempt as Attempt
from conquiet import BacklogStats as BacklogStats
from conquiet import Backoff as Backoff
from conquiet import BytesCodec as BytesCodec
from conquiet import Codec as Codec
from conquiet import ConfigError as ConfigError
from conquiet import ConquietError as ConquietError
from conquiet import ConsistentHashPartitioner as ConsistentHashPartitioner
from conquiet import DataLostError as DataLostError
from conquiet import DbFactory as DbFactory
from conquiet import DbTx as DbTx
from conquiet import DeadLetter as DeadLetter
from conquiet import DeadLetterPolicy as DeadLetterPolicy
from conquiet import DuplicateJobError as DuplicateJobError
from conquiet import EntryId as EntryId
from conquiet import GroupInfo as GroupInfo
from conquiet import GroupLostError as GroupLostError
from conquiet import GroupPartition as GroupPartition
from conquiet import HashPartitioner as HashPartitioner
from conquiet import Health as Health
from conquiet import Job as Job
from conquiet import JobHealth as JobHealth
from conquiet import JobPage as JobPage
from conquiet import JobRetention as JobRetention
from conquiet import JobSpec as JobSpec
from conquiet import JobState as JobState
from conquiet import JobStateError as JobStateError
from conquiet import JobStore as JobStore
from conquiet import JsonCodec as JsonCodec
from conquiet import Keep as Keep
from conquiet import LeaseError as LeaseError
from conquiet import LeaseLostError as LeaseLostError
from conquiet import LegacyTopic as LegacyTopic
from conquiet import MalformedMessageError as MalformedMessageError
from conquiet import MemberInfo as MemberInfo
from conquiet import Message as Message
from conquiet import Outgoing as Outgoing
from conquiet import Partitioner as Partitioner
from conquiet import PartitionInfo as PartitionInfo
from conquiet import PayloadError as PayloadError
from conquiet import PendingEntry as PendingEntry
from conquiet import PendingPage as PendingPage
from conquiet import QueueConfig as QueueConfig
from conquiet import QueueError as QueueError
from conquiet import QueueMessage as QueueMessage
from conquiet import Reject as Reject
from conquiet import Retention as Retention
from conquiet import Retry as Retry
from conquiet import RetryPolicy as RetryPolicy
from conquiet import StaleLeaseError as StaleLeaseError
from conquiet import StreamAdded as StreamAdded
from conquiet import StreamDisowned as StreamDisowned
from conquiet import StreamExpired as StreamExpired
from conquiet import StreamNotOwnedError as StreamNotOwnedError
from conquiet import StreamTerminated as StreamTerminated
from conquiet import SubscribeOptions as SubscribeOptions
from conquiet import TopicDefaults as TopicDefaults
from conquiet import TopicFullError as TopicFullError
from conquiet import TopicInfo as TopicInfo
from conquiet import TypedCodec as TypedCodec
from conquiet import UnknownJobError as UnknownJobError
from conquiet import UnknownTopicError as UnknownTopicError
from conquiet import __all__ as __all__
from conquiet.kit.options import takes
from conquiet.sync._balance import StreamBalancer as StreamBalancer
from conquiet.sync._balance import StreamLease as StreamLease
from conquiet.sync._bridge import Facade, Twin, blocking, passing
from conquiet.sync._jobs import JobQueue as JobQueue
from conquiet.sync._jobs import JobWorker as JobWorker
from conquiet.sync._jobs import MemoryStore as MemoryStore
from conquiet.sync._jobs import PostgresStore as PostgresStore
from conquiet.sync._jobs import RedisStore as RedisStore
from conquiet.sync._portal import call
from conquiet.sync._queue import EmbeddedRedis as EmbeddedRedis
from conquiet.sync._queue import QueueConsumer as QueueConsumer
from conquiet.sync._queue import RedisStreamsQueue as RedisStreamsQueue
from conquiet.sync._signals import StoppedBySignals
from conquiet.sync._topics import Delivery as Delivery
from conquiet.sync._topics import admin_of, consume, subscribe
from conquiet.topics.options import BrokerKeywords, BrokerOptions
from conquiet.topics.server.topics import TopicLike
from conquiet.wire.address import AddressLike

_C = TypeVar("_C", core.Subscription, core.Messages)


class Admin(Twin[core.Admin]):
    __doc__ = core.Admin.__doc__

    def __init__(self, broker: Broker) -> None:
        super().__init__(admin_of, broker)

    list_topics = blocking(core.Admin.list_topics)
    describe_topic = blocking(core.Admin.describe_topic)
    list_groups = blocking(core.Admin.list_groups)
    describe_group = blocking(core.Admin.describe_group)
    read = blocking(core.Admin.read)
    pending = blocking(core.Admin.pending)
    dead_letters = blocking(core.Admin.dead_letters)
    replay = blocking(core.Admin.replay)
    purge = blocking(core.Admin.purge)
    grow = blocking(core.Admin.grow)
    configure = blocking(core.Admin.configure)
    trim = blocking(core.Admin.trim)
    reset_group = blocking(core.Admin.reset_group)
    delete_group = blocking(core.Admin.delete_group)
    delete_topic = blocking(core.Admin.delete_topic)


class Broker(Facade[core.Broker]):
    __doc__ = core.Broker.__doc__

    @takes(BrokerOptions)
    def __init__(self, client: AddressLike, **options: Unpack[BrokerKeywords]) -> None:
        super().__init__(core.Broker, Address.of(client), **options)

    @classmethod
    @takes(BrokerOptions)
    def connect(cls, url: str, **options: Unpack[BrokerKeywords]) -> Self:
        return cls(url, **options)

    @property
    def admin(self) -> Admin:
        return Admin(self)

    open = blocking(core.Broker.open)
    close = blocking(core.Broker.aclose)
    create_topic = blocking(core.Broker.create_topic)
    collector = passing(core.Broker.collector)
    legacy = passing(core.Broker.legacy)
    send = blocking(core.Broker.send)
    send_batch = blocking(core.Broker.send_batch)

    def subscribe(
        self,
        topic: TopicLike | Sequence[TopicLike],
        *,
        group: str,
        handler: Callable[[Message], None] | Callable[[list[Message]], Sequence[BaseException | None] | None],
        options: SubscribeOptions | None = None,
    ) -> Subscription:
        return Subscription(self, topic, group=group, handler=handler, options=options)

    def consume(
        self, topic: TopicLike | Sequence[TopicLike], *, group: str, options: SubscribeOptions | None = None
    ) -> Messages:
        return Messages(self, topic, group=group, options=options)


class TopicConsumer(StoppedBySignals[_C]):
    """What both ways of consuming topics share."""

    @property
    def consumer(self) -> str:
        """The name under which it is known in Redis: the configured one and a part that is new each time."""
        return self._core().consumer

    @property
    def owned(self) -> Mapping[str, tuple[int, ...]]:
        """The partitions that it owns now, by topic."""
        return self._core().owned

    @property
    def inflight(self) -> int:
        """Messages that were delivered and are not settled."""
        return self._core().inflight

    @property
    def paused(self) -> bool:
        """Whether nothing new is taken."""
        return self._core().paused

    pause = passing(core.Subscription.pause)
    resume = passing(core.Subscription.resume)
    stop = passing(core.Subscription.stop)
    health = passing(core.Subscription.health)
    close = blocking(core.Subscription.aclose)

    def _wants_signals(self) -> bool:
        options = self._recipe[2]["options"]
        return not isinstance(options, SubscribeOptions) or options.handle_signals


class Subscription(TopicConsumer[core.Subscription]):
    __doc__ = core.Subscription.__doc__

    def __init__(
        self,
        broker: Broker,
        topic: TopicLike | Sequence[TopicLike],
        *,
        group: str,
        handler: Callable[[Any], Any],
        options: SubscribeOptions | None = None,
    ) -> None:
        super().__init__(subscribe, broker, topic, group=group, handler=handler, options=options)

    def wait(self) -> None:
        with self._signals():
            call(self._core().wait)


class Messages(TopicConsumer[core.Messages]):
    __doc__ = core.Messages.__doc__

    def __init__(
        self,
        broker: Broker,
        topic: TopicLike | Sequence[TopicLike],
        *,
        group: str,
        options: SubscribeOptions | None = None,
    ) -> None:
        super().__init__(consume, broker, topic, group=group, options=options)

    wait = blocking(core.Messages.wait)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delivery:
        delivery = self.next()
        if delivery is None:
            raise StopIteration
        return delivery

    def next(self, timeout: float | None = None) -> Delivery | None:
        found = call(self._core().next, timeout)
        assert found is None or isinstance(found, Delivery)
        return found
