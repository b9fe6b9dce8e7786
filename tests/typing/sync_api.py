"""What type checkers must see of the synchronous API; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

import conquiet
from conquiet.sync import (
    Address,
    Admin,
    BacklogStats,
    Backoff,
    Broker,
    BytesCodec,
    Codec,
    ConfigError,
    ConquietError,
    ConsistentHashPartitioner,
    DbFactory,
    DbTx,
    DeadLetter,
    Delivery,
    EmbeddedRedis,
    EntryId,
    GroupInfo,
    GroupLostError,
    GroupPartition,
    Health,
    JsonCodec,
    LeaseError,
    LeaseLostError,
    LegacyTopic,
    MalformedMessageError,
    MemberInfo,
    Message,
    Messages,
    Outgoing,
    Partitioner,
    PartitionInfo,
    PayloadError,
    PendingEntry,
    PendingPage,
    QueueConfig,
    QueueConsumer,
    QueueError,
    QueueMessage,
    RedisStreamsQueue,
    Reject,
    Retention,
    Retry,
    RetryPolicy,
    SubscribeOptions,
    Subscription,
    TopicDefaults,
    TopicFullError,
    TopicInfo,
    TypedCodec,
    UnknownTopicError,
)


def the_config() -> None:
    config = QueueConfig("orders", "billing", "billing-1", block_ms=1, max_read_count=2, claim_idle_ms=3)
    assert_type(config, QueueConfig)
    assert_type(config.stream_key, str)
    assert_type(config.consumer_group, str)
    assert_type(config.consumer_name, str)
    assert_type(config.block_ms, int)
    assert_type(config.max_read_count, int)
    assert_type(config.claim_idle_ms, int)


def the_server(path: Path) -> None:
    with EmbeddedRedis(appendonly=True, unix_socket=False, port=None, directory=path, binary="redis-server") as server:
        assert_type(server, EmbeddedRedis)
        assert_type(server.url, str)
        assert_type(server.version, str)
        assert_type(server.software, str)
        assert_type(server.pid, int)
        assert_type(server.directory, Path)
    assert_type(EmbeddedRedis(settings={"maxmemory": "64mb"}).open(), None)
    assert_type(server.close(), None)


def ways_to_a_queue(config: QueueConfig, client: Redis, cluster: RedisCluster, address: Address) -> None:
    assert_type(RedisStreamsQueue.connect("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue.connect(url="redis://localhost", config=config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(client, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(cluster, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(address, config), RedisStreamsQueue)
    assert_type(Address.of(client), Address)


def the_queue(queue: RedisStreamsQueue, payload: Mapping[str, Any]) -> None:
    with queue as entered:
        assert_type(entered, RedisStreamsQueue)
    assert_type(queue.config, QueueConfig)
    assert_type(queue.open(), None)
    assert_type(queue.close(), None)
    assert_type(queue.enqueue(payload), str)
    assert_type(queue.enqueue(payload={"n": 1}), str)
    assert_type(queue.enqueue_many([payload]), list[str])
    assert_type(queue.enqueue_many({"n": n} for n in range(3)), list[str])
    assert_type(queue.read(), list[QueueMessage])
    assert_type(queue.read(1000, 10), list[QueueMessage])
    assert_type(queue.read(block_ms=None, count=10), list[QueueMessage])
    messages = queue.read()
    assert_type(queue.ack(*messages), None)
    assert_type(queue.ack(), None)
    assert_type(queue.claim_stale(min_idle_ms=60_000, count=10), list[QueueMessage])
    assert_type(queue.claim_stale(), list[QueueMessage])
    assert_type(queue.backlog_stats(), BacklogStats)


def a_bound_method(queue: RedisStreamsQueue) -> None:
    enqueue: Callable[[Mapping[str, Any]], str] = queue.enqueue
    assert_type([*map(enqueue, [{"n": 1}])], list[str])


def a_subclass(config: QueueConfig) -> None:
    class Orders(RedisStreamsQueue):
        """Somebody's own."""

    assert_type(Orders.connect("redis://localhost", config), Orders)
    with Orders("redis://localhost", config) as orders:
        assert_type(orders, Orders)
        assert_type(orders.enqueue({}), str)


def the_consumer(queue: RedisStreamsQueue) -> None:
    with QueueConsumer(queue, handle_signals=False) as consumer:
        assert_type(consumer, QueueConsumer)
    assert_type(consumer.config, QueueConfig)
    assert_type(consumer.stopping, bool)
    assert_type(consumer.stop(), None)
    assert_type(consumer.next(), QueueMessage | None)
    assert_type(consumer.next(block_ms=None), QueueMessage | None)
    assert_type(consumer.iter_messages(), Iterator[QueueMessage])
    for message in consumer.iter_messages():
        assert_type(message, QueueMessage)
        assert_type(consumer.ack(message), None)


class Database:
    """Begins SQLite's transactions."""

    def begin(self) -> sqlite3.Connection:
        """One of them."""
        return sqlite3.connect(":memory:")


def running(consumer: QueueConsumer, anything: DbFactory[DbTx]) -> None:
    def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
        tx.execute("SELECT 1", (message.payload["n"],))

    def any_handler(message: QueueMessage, tx: DbTx) -> None: ...

    assert_type(consumer.run(handler=handler, db_factory=Database()), None)
    consumer.run(handler=any_handler, db_factory=anything)
    consumer.run(handler=any_handler, db_factory=Database())


def the_records(message: QueueMessage, stats: BacklogStats) -> None:
    assert_type(message.stream, str)
    assert_type(message.group, str)
    assert_type(message.id, str)
    assert_type(message.payload, dict[str, Any])
    assert_type(message.raw, bytes)
    assert_type(message.fields, tuple[bytes, ...])
    assert_type(message.delivery_count, int | None)
    assert_type(stats.length, int)
    assert_type(stats.pending, int)
    assert_type(stats.pending_by_consumer, Mapping[str, int])
    assert_type(stats.oldest_pending_id, str | None)
    assert_type(stats.oldest_pending_idle_ms, int | None)
    assert_type(stats.last_delivered_id, str)
    assert_type(stats.lag, int | None)


def the_errors(error: ConquietError) -> None:
    if isinstance(error, MalformedMessageError):
        assert_type(error.fields, tuple[bytes, ...])
        assert_type(error.entry_ids, tuple[str | None, ...])
    elif isinstance(error, QueueError):
        assert_type(error.entry_ids, tuple[str | None, ...])
    elif isinstance(error, PayloadError):
        assert_type(error.path, str)
    elif isinstance(error, ConfigError):
        value_error: ValueError = error
        assert_type(value_error.args, tuple[Any, ...])


class OtherTx:
    """A transaction of another database."""

    def commit(self) -> None:
        """Keep it."""

    def rollback(self) -> None:
        """Undo it."""


def ways_to_a_broker(client: Redis, cluster: RedisCluster, address: Address, partitioner: Partitioner) -> None:
    assert_type(Broker.connect("redis://localhost"), Broker)
    assert_type(Broker(client, namespace="staging", codec=BytesCodec()), Broker)
    assert_type(Broker(cluster, partitioner=partitioner, auto_create=TopicDefaults(partitions=4)), Broker)
    assert_type(Broker(address, partitioner=ConsistentHashPartitioner(), dedup_window=60, dedup_size=10), Broker)
    assert_type(Broker("redis://localhost", partitioner=lambda key, partitions: 0), Broker)
    assert_type(Broker(client=address, dedup_size=10), Broker)
    assert_type(Broker.connect(url="redis://localhost", namespace="staging"), Broker)
    codecs: list[Codec] = [JsonCodec(), BytesCodec(), TypedCodec(int)]
    assert_type(Broker.connect("redis://localhost", codec=codecs[0]), Broker)


def the_broker(broker: Broker) -> None:
    with broker as entered:
        assert_type(entered, Broker)
    assert_type(broker.open(), None)
    assert_type(broker.close(), None)
    assert_type(broker.admin, Admin)
    assert_type(broker.legacy("app:orders"), LegacyTopic)
    assert_type(broker.collector(["orders"], most_partitions=10).close(), None)
    retention = Retention(max_len=1_000_000, max_age=86_400, on_full="reject")
    assert_type(broker.create_topic("orders", partitions=8, retention=retention, adopt=True), None)


def sending(broker: Broker) -> None:
    assert_type(broker.send("orders", {"id": 1}), EntryId)
    assert_type(broker.send(broker.legacy("app:orders"), {"id": 1}), EntryId)
    id = broker.send("orders", 1, key="k", headers={"a": "b"}, message_id="m", max_retries=1, delay=2)
    assert_type(id.partition, int)
    text: str = id
    messages = (Outgoing(text, key="k", headers=None, message_id="m", max_retries=0, partition=1) for _ in range(3))
    assert_type(broker.send_batch("orders", messages), list[EntryId])


def subscribing(broker: Broker) -> None:
    def handler(message: Message) -> None: ...

    def batch_handler(messages: Sequence[Message]) -> list[BaseException | None]:
        return [Reject("why") if message.retry_count else Retry("later", delay=1.0) for message in messages]

    retry = RetryPolicy(max_retries=5, backoff=Backoff(base=0.1, kind="fixed"), mode="requeue", give_up_on=OSError)
    options = SubscribeOptions(max_inflight=10, retry=retry, order="block_key", start="latest")
    with broker.subscribe("orders", group="billing", handler=handler, options=options) as subscription:
        assert_type(subscription, Subscription)
        assert_type(subscription.wait(), None)
    assert_type(broker.subscribe(["a", broker.legacy("b")], group="g", handler=handler), Subscription)
    assert_type(broker.subscribe("orders", group="g", handler=batch_handler), Subscription)
    assert_type(subscription.close(), None)
    assert_type(subscription.stop(), None)
    assert_type(subscription.pause(), None)
    assert_type(subscription.resume(), None)
    assert_type(subscription.paused, bool)
    assert_type(subscription.inflight, int)
    assert_type(subscription.consumer, str)
    assert_type(subscription.owned, Mapping[str, tuple[int, ...]])
    assert_type(subscription.health(), Health)


def pulling(broker: Broker, options: SubscribeOptions) -> None:
    with broker.consume("orders", group="billing", options=options) as messages:
        assert_type(messages, Messages)
        for message in messages:
            assert_type(message, Delivery)
            plain: Message = message
            assert_type(plain.id, str)
            assert_type(message.ack(), None)
            assert_type(message.retry(delay=1.0, error="later"), None)
            assert_type(message.reject("no good"), None)
        assert_type(messages.next(), Delivery | None)
        assert_type(messages.next(timeout=1.0), Delivery | None)
        assert_type(messages.wait(), None)
    assert_type(messages.close(), None)
    assert_type(messages.stop(), None)
    assert_type(messages.pause(), None)
    assert_type(messages.resume(), None)
    assert_type(messages.paused, bool)
    assert_type(messages.inflight, int)
    assert_type(messages.consumer, str)
    assert_type(messages.owned, Mapping[str, tuple[int, ...]])
    assert_type(messages.health(), Health)


def the_admin(admin: Admin, legacy: LegacyTopic, moment: dt.datetime) -> None:
    assert_type(admin.list_topics(), list[str])
    assert_type(admin.describe_topic("orders"), TopicInfo)
    assert_type(admin.list_groups(legacy), list[str])
    assert_type(admin.describe_group("orders", "billing"), GroupInfo)
    assert_type(admin.pending("orders", "billing", count=10, cursor=None), PendingPage)
    assert_type(admin.dead_letters("orders", count=10, after="1-0", group="billing"), list[DeadLetter])
    assert_type(admin.replay("orders", ids=["1-0"], group="billing"), int)
    assert_type(admin.purge("orders"), int)
    assert_type(admin.grow("orders", partitions=16), TopicInfo)
    assert_type(admin.configure("orders", Retention(max_age=60)), TopicInfo)
    assert_type(admin.trim("orders", max_len=10, max_age=1.5), int)
    assert_type(admin.reset_group("orders", "billing", "earliest"), None)
    assert_type(admin.reset_group("orders", "billing", moment, force=True), None)
    assert_type(admin.reset_group("orders", "billing", {0: "1-0"}), None)
    assert_type(admin.delete_group("orders", "billing", force=False), None)
    assert_type(admin.delete_topic("orders", force=True), None)


def what_an_operator_sees(topic: TopicInfo, group: GroupInfo, page: PendingPage, health: Health) -> None:
    assert_type(topic.retention, Retention)
    assert_type(topic.created, dt.datetime | None)
    assert_type(topic.by_partition, tuple[PartitionInfo, ...])
    assert_type(topic.by_partition[0].last_id, str | None)
    assert_type(group.lag, int)
    assert_type(group.pending, int)
    assert_type(group.unowned, tuple[int, ...])
    assert_type(group.members, tuple[MemberInfo, ...])
    assert_type(group.members[0].heartbeat_age, float)
    assert_type(group.partitions, tuple[GroupPartition, ...])
    assert_type(group.partitions[0].owner, str | None)
    assert_type(page.entries, tuple[PendingEntry, ...])
    assert_type(page.entries[0].id, EntryId)
    assert_type(page.cursor, str | None)
    assert_type(health.healthy, bool)
    assert_type(health.error, str | None)


def the_errors_of_topics(full: TopicFullError, group: GroupLostError, lease: LeaseLostError) -> None:
    queue_errors: list[QueueError] = [full, group]
    lease_error: LeaseError = lease
    config_error: ConfigError = UnknownTopicError("there is no topic 'orders'")
    assert_type(queue_errors[0].entry_ids, tuple[str | None, ...])
    assert_type((lease_error.args, config_error.args), tuple[tuple[Any, ...], tuple[Any, ...]])


# --- what must be refused -------------------------------------------------------------------------------------------


def wrong_arguments(queue: RedisStreamsQueue, config: QueueConfig) -> None:
    queue.read(block_ms="1000")  # type: ignore[arg-type]
    queue.read(1, 2, 3)  # type: ignore[call-arg]
    queue.read(blok_ms=1)  # type: ignore[call-arg]
    queue.enqueue()  # type: ignore[call-arg]
    queue.enqueue([1])  # type: ignore[arg-type]
    queue.enqueue({1: 1})  # type: ignore[dict-item]
    queue.enqueue_many({"n": 1})  # type: ignore[dict-item]
    queue.ack("1-0")  # type: ignore[arg-type]
    queue.ack(queue.read())  # type: ignore[arg-type]
    queue.claim_stale(count=None)  # type: ignore[arg-type]
    RedisStreamsQueue.connect("redis://localhost")  # type: ignore[call-arg]
    RedisStreamsQueue(b"redis://", config)  # type: ignore[arg-type]
    EmbeddedRedis(True)  # type: ignore[call-arg]
    queue.config = config  # type: ignore[misc]


async def awaiting_what_is_there(queue: RedisStreamsQueue, consumer: QueueConsumer) -> None:
    await queue.enqueue({})  # type: ignore[misc]
    async with queue:  # type: ignore[attr-defined]
        pass
    async for _ in consumer.iter_messages():  # type: ignore[attr-defined]
        pass


async def an_async_handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
    """Belongs to the other API."""


def mixed_apis(queue: conquiet.RedisStreamsQueue, consumer: QueueConsumer) -> None:
    QueueConsumer(queue)  # type: ignore[arg-type]
    consumer.run(handler=an_async_handler, db_factory=Database())  # type: ignore[arg-type]


def another_databases_handler(consumer: QueueConsumer) -> None:
    def handler(message: QueueMessage, tx: OtherTx) -> None: ...

    consumer.run(handler=handler, db_factory=Database())  # type: ignore[arg-type]
    consumer.run(handler=handler)  # type: ignore[call-arg]


def names_of_the_other_api(queue: RedisStreamsQueue) -> None:
    queue.aclose()  # type: ignore[attr-defined]


def wrong_arguments_of_topics(broker: Broker, admin: Admin, message: Message, some: Any) -> None:
    # `some` is Any: mypy may also report that a value given without its name does not fit one of the options.
    broker.send("orders")  # type: ignore[call-arg]
    broker.send("orders", 1, "key")  # type: ignore[call-arg]
    broker.send("orders", 1, key=5)  # type: ignore[arg-type]
    broker.send("orders", 1, headers={"a": 1})  # type: ignore[dict-item]
    broker.send_batch("orders", [1])  # type: ignore[list-item]
    broker.create_topic("orders", partitions="8")  # type: ignore[arg-type]
    admin.replay("orders", ids=[1])  # type: ignore[list-item]
    admin.reset_group("orders", "billing", "nowhere")  # type: ignore[arg-type]
    admin.delete_topic(broker.legacy("app:orders"))  # type: ignore[arg-type]
    broker.subscribe("orders", group="g", handler=5)  # type: ignore[arg-type]
    broker.subscribe("orders", handler=print)  # type: ignore[call-arg]
    broker.consume(5, group="g")  # type: ignore[arg-type]
    Broker(b"redis://")  # type: ignore[arg-type]
    Broker("redis://localhost", some)  # type: ignore[call-arg]
    Broker("redis://localhost", namespase="blue")  # type: ignore[call-arg]
    Broker("redis://localhost", dedup_size="10")  # type: ignore[arg-type]
    Broker.connect("redis://localhost", some)  # type: ignore[call-arg]
    Broker.connect("redis://localhost", namespase="blue")  # type: ignore[call-arg]
    Broker.connect("redis://localhost", auto_create=True)  # type: ignore[arg-type]
    SubscribeOptions(10)  # type: ignore[call-arg]
    SubscribeOptions(order="sorted")  # type: ignore[arg-type]
    RetryPolicy(mode="drop")  # type: ignore[arg-type]
    Retention(on_full="panic")  # type: ignore[arg-type]
    broker.admin = admin  # type: ignore[misc]
    message.timestamp = None  # type: ignore[misc, assignment]


async def an_async_topic_handler(message: Message) -> None:
    """Belongs to the other API."""


async def awaiting_what_is_there_of_topics(broker: Broker, messages: Messages, delivery: Delivery) -> None:
    await broker.send("orders", 1)  # type: ignore[misc]
    await delivery.ack()  # type: ignore[func-returns-value, misc]
    async with broker.consume("orders", group="g"):  # type: ignore[attr-defined]
        pass
    async for _ in messages:  # type: ignore[attr-defined]
        pass
    messages.aclose()  # type: ignore[attr-defined]
    broker.subscribe("orders", group="g", handler=an_async_topic_handler)  # type: ignore[arg-type]
