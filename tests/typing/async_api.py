"""What type checkers must see of the asynchronous API; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

import conquiet.sync
from conquiet import (
    Address,
    Admin,
    BacklogStats,
    Backoff,
    Broker,
    BytesCodec,
    Codec,
    ConsistentHashPartitioner,
    DbFactory,
    DbTx,
    DeadLetter,
    DeadLetterPolicy,
    Delivery,
    EmbeddedRedis,
    EntryId,
    GroupInfo,
    HashPartitioner,
    Health,
    JsonCodec,
    LegacyTopic,
    Message,
    Messages,
    Outgoing,
    Partitioner,
    PendingPage,
    QueueConfig,
    QueueConsumer,
    QueueMessage,
    RedisStreamsQueue,
    Reject,
    Retention,
    Retry,
    RetryPolicy,
    SubscribeOptions,
    Subscription,
    TopicDefaults,
    TopicInfo,
    TypedCodec,
)


async def the_server(path: Path) -> None:
    async with EmbeddedRedis(
        appendonly=True, unix_socket=False, port=None, directory=path, binary="redis-server"
    ) as server:
        assert_type(server, EmbeddedRedis)
        assert_type(server.url, str)
        assert_type(server.version, str)
        assert_type(server.software, str)
        assert_type(server.pid, int)
        assert_type(server.directory, Path)
    assert_type(await EmbeddedRedis(settings={"maxmemory": "64mb"}).open(), None)
    assert_type(await server.aclose(), None)


def ways_to_a_queue(config: QueueConfig, client: Redis, cluster: RedisCluster, address: Address) -> None:
    assert_type(RedisStreamsQueue.connect("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue.connect(url="redis://localhost", config=config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue("redis://localhost", config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(client, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(cluster, config), RedisStreamsQueue)
    assert_type(RedisStreamsQueue(address, config), RedisStreamsQueue)
    assert_type(Address.of("redis://localhost"), Address)
    assert_type(str(address), str)


async def the_queue(queue: RedisStreamsQueue, payload: Mapping[str, Any]) -> None:
    async with queue as entered:
        assert_type(entered, RedisStreamsQueue)
    assert_type(queue.config, QueueConfig)
    assert_type(await queue.open(), None)
    assert_type(await queue.aclose(), None)
    assert_type(await queue.enqueue(payload), str)
    assert_type(await queue.enqueue(payload={"n": 1}), str)
    assert_type(await queue.enqueue_many([payload]), list[str])
    assert_type(await queue.enqueue_many({"n": n} for n in range(3)), list[str])
    assert_type(await queue.read(), list[QueueMessage])
    assert_type(await queue.read(1000, 10), list[QueueMessage])
    assert_type(await queue.read(block_ms=None, count=10), list[QueueMessage])
    messages = await queue.read()
    assert_type(await queue.ack(*messages), None)
    assert_type(await queue.ack(), None)
    assert_type(await queue.claim_stale(min_idle_ms=60_000, count=10), list[QueueMessage])
    assert_type(await queue.claim_stale(), list[QueueMessage])
    assert_type(await queue.backlog_stats(), BacklogStats)


async def a_bound_method(queue: RedisStreamsQueue) -> None:
    enqueue: Callable[[Mapping[str, Any]], Awaitable[str]] = queue.enqueue
    assert_type(await enqueue({}), str)


async def a_subclass(config: QueueConfig) -> None:
    class Orders(RedisStreamsQueue):
        """Somebody's own."""

    assert_type(Orders.connect("redis://localhost", config), Orders)
    async with Orders("redis://localhost", config) as orders:
        assert_type(orders, Orders)


async def the_consumer(queue: RedisStreamsQueue) -> None:
    async with QueueConsumer(queue, handle_signals=False) as consumer:
        assert_type(consumer, QueueConsumer)
    assert_type(consumer.config, QueueConfig)
    assert_type(consumer.stopping, bool)
    assert_type(consumer.stop(), None)
    assert_type(await consumer.next(), QueueMessage | None)
    assert_type(await consumer.next(block_ms=None), QueueMessage | None)
    assert_type(consumer.iter_messages(), AsyncIterator[QueueMessage])
    async for message in consumer.iter_messages():
        assert_type(message, QueueMessage)
        assert_type(await consumer.ack(message), None)


class Database:
    """Begins SQLite's transactions."""

    def begin(self) -> sqlite3.Connection:
        """One of them."""
        return sqlite3.connect(":memory:")


class AsyncTx:
    """A transaction of some asynchronous driver."""

    async def execute(self, statement: str) -> None:
        """Do something."""

    async def commit(self) -> None:
        """Keep it."""

    async def rollback(self) -> None:
        """Undo it."""


class AsyncDatabase:
    """Begins them."""

    async def begin(self) -> AsyncTx:
        """One of them."""
        return AsyncTx()


async def running(consumer: QueueConsumer, anything: DbFactory[DbTx]) -> None:
    def handler(message: QueueMessage, tx: sqlite3.Connection) -> None:
        tx.execute("SELECT 1", (message.payload["n"],))

    async def async_handler(message: QueueMessage, tx: AsyncTx) -> None:
        await tx.execute("SELECT 1")

    async def mixed_handler(message: QueueMessage, tx: sqlite3.Connection) -> None: ...

    def any_handler(message: QueueMessage, tx: DbTx) -> None: ...

    assert_type(await consumer.run(handler=handler, db_factory=Database()), None)
    await consumer.run(handler=async_handler, db_factory=AsyncDatabase())
    await consumer.run(handler=mixed_handler, db_factory=Database())
    await consumer.run(handler=any_handler, db_factory=anything)
    await consumer.run(handler=any_handler, db_factory=AsyncDatabase())


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


async def the_broker(broker: Broker) -> None:
    async with broker as entered:
        assert_type(entered, Broker)
    assert_type(await broker.open(), None)
    assert_type(await broker.aclose(), None)
    assert_type(broker.admin, Admin)
    assert_type(broker.legacy("app:orders"), LegacyTopic)
    assert_type(broker.collector(["orders"], most_partitions=10).close(), None)
    retention = Retention(max_len=1_000_000, max_age=86_400, on_full="reject")
    assert_type(await broker.create_topic("orders", partitions=8, retention=retention, adopt=True), None)


async def sending(broker: Broker) -> None:
    assert_type(await broker.send("orders", {"id": 1}), EntryId)
    assert_type(await broker.send(broker.legacy("app:orders"), {"id": 1}), EntryId)
    id = await broker.send(
        "orders", 1, key="k", headers={"a": "b"}, message_id="m", max_retries=1, partition=0, delay=2
    )
    assert_type(id.partition, int)
    text: str = id
    messages = (Outgoing(text, key="k", headers=None, message_id="m", max_retries=0, partition=1) for _ in range(3))
    assert_type(await broker.send_batch("orders", messages), list[EntryId])


async def subscribing(broker: Broker) -> None:
    def handler(message: Message) -> None: ...

    async def async_handler(message: Message) -> None: ...

    def batch_handler(messages: Sequence[Message]) -> list[BaseException | None]:
        return [Reject("why") if message.retry_count else Retry("later", delay=1.0) for message in messages]

    async def async_batch_handler(messages: Sequence[Message]) -> None: ...

    retry = RetryPolicy(max_retries=5, backoff=Backoff(base=0.1, kind="fixed"), mode="requeue", give_up_on=OSError)
    options = SubscribeOptions(max_inflight=10, retry=retry, order="block_key", start="latest")
    async with broker.subscribe("orders", group="billing", handler=handler, options=options) as subscription:
        assert_type(subscription, Subscription)
        assert_type(await subscription.wait(), None)
    assert_type(broker.subscribe(["a", broker.legacy("b")], group="g", handler=handler), Subscription)
    assert_type(broker.subscribe("orders", group="g", handler=batch_handler), Subscription)
    assert_type(broker.subscribe("orders", group="g", handler=async_handler), Subscription)
    assert_type(broker.subscribe("orders", group="g", handler=async_batch_handler), Subscription)
    assert_type(await subscription.aclose(), None)
    assert_type(subscription.stop(), None)
    assert_type(subscription.pause(), None)
    assert_type(subscription.resume(), None)
    assert_type(subscription.paused, bool)
    assert_type(subscription.inflight, int)
    assert_type(subscription.consumer, str)
    assert_type(subscription.owned, Mapping[str, tuple[int, ...]])
    assert_type(subscription.health(), Health)


async def pulling(broker: Broker, options: SubscribeOptions) -> None:
    async with broker.consume("orders", group="billing", options=options) as messages:
        assert_type(messages, Messages)
        async for message in messages:
            assert_type(message, Delivery)
            plain: Message = message
            assert_type(plain.id, str)
            assert_type(await message.ack(), None)
            assert_type(await message.retry(delay=1.0, error="later"), None)
            assert_type(await message.reject("no good"), None)
        assert_type(await messages.next(), Delivery | None)
        assert_type(await messages.next(timeout=1.0), Delivery | None)
        assert_type(await messages.wait(), None)
    assert_type(await messages.aclose(), None)
    assert_type(messages.stop(), None)
    assert_type(messages.pause(), None)
    assert_type(messages.resume(), None)
    assert_type(messages.paused, bool)
    assert_type(messages.inflight, int)
    assert_type(messages.consumer, str)
    assert_type(messages.owned, Mapping[str, tuple[int, ...]])
    assert_type(messages.health(), Health)


async def the_admin(admin: Admin, legacy: LegacyTopic, moment: dt.datetime) -> None:
    assert_type(await admin.list_topics(), list[str])
    assert_type(await admin.describe_topic("orders"), TopicInfo)
    assert_type(await admin.list_groups(legacy), list[str])
    assert_type(await admin.describe_group("orders", "billing"), GroupInfo)
    assert_type(await admin.pending("orders", "billing", count=10, cursor=None), PendingPage)
    assert_type(await admin.dead_letters("orders", count=10, after="1-0", group="billing"), list[DeadLetter])
    assert_type(await admin.replay("orders", ids=["1-0"], group="billing"), int)
    assert_type(await admin.purge("orders"), int)
    assert_type(await admin.grow("orders", partitions=16), TopicInfo)
    assert_type(await admin.configure("orders", Retention(max_age=60)), TopicInfo)
    assert_type(await admin.trim("orders", max_len=10, max_age=1.5), int)
    assert_type(await admin.reset_group("orders", "billing", "earliest"), None)
    assert_type(await admin.reset_group("orders", "billing", moment, force=True), None)
    assert_type(await admin.reset_group("orders", "billing", {0: "1-0"}), None)
    assert_type(await admin.delete_group("orders", "billing", force=False), None)
    assert_type(await admin.delete_topic("orders", force=True), None)


def a_message(message: Message, letter: DeadLetter) -> None:
    assert_type(message.id, str)
    assert_type(message.topic, str)
    assert_type(message.partition, int)
    assert_type(message.group, str)
    assert_type(message.key, str | None)
    assert_type(message.payload, Any)
    assert_type(message.headers, Mapping[str, str])
    assert_type(message.timestamp, dt.datetime)
    assert_type(message.retry_count, int)
    assert_type(message.max_retries, int | None)
    assert_type(message.original_id, str)
    assert_type(message.replayed_from, str | None)
    assert_type(message.message_id, str | None)
    assert_type(message.epoch, int)
    assert_type(message.raw, bytes)
    assert_type(message.fields, Mapping[bytes, bytes])
    assert_type(letter.original_id, str)
    assert_type(letter.attempts, int)
    assert_type(letter.payload, Any)
    assert_type(letter.headers, Mapping[str, str])
    assert_type(letter.fields, tuple[bytes, ...])
    assert_type(letter.failed_at, dt.datetime | None)


def the_policies(partitioner: Partitioner) -> None:
    assert_type(Backoff(base=0.5, cap=30.0, kind="full_jitter").delay(3), float)
    assert_type(RetryPolicy(retry_on=(OSError, ValueError)).retries(OSError()), bool)
    assert_type(DeadLetterPolicy(drop_headers=("token",), transform=lambda fields: fields).include_traceback, bool)
    partitioners: list[Partitioner] = [HashPartitioner(), ConsistentHashPartitioner(virtual_nodes=8)]
    assert_type(partitioners[0]("key", 8), int)
    assert_type(partitioner(None, 8), int)


# --- what must be refused -------------------------------------------------------------------------------------------


async def wrong_arguments(queue: RedisStreamsQueue, config: QueueConfig) -> None:
    await queue.read(block_ms="1000")  # type: ignore[arg-type]
    await queue.read(1, 2, 3)  # type: ignore[call-arg]
    await queue.read(blok_ms=1)  # type: ignore[call-arg]
    await queue.enqueue()  # type: ignore[call-arg]
    await queue.enqueue([1])  # type: ignore[arg-type]
    await queue.ack("1-0")  # type: ignore[arg-type]
    await queue.claim_stale(count=None)  # type: ignore[arg-type]
    RedisStreamsQueue.connect("redis://localhost")  # type: ignore[call-arg]
    RedisStreamsQueue(b"redis://", config)  # type: ignore[arg-type]
    EmbeddedRedis(True)  # type: ignore[call-arg]
    QueueConfig("orders", "billing")  # type: ignore[call-arg]
    config.block_ms = 1  # type: ignore[misc]
    queue.config = config  # type: ignore[misc]


def a_message_is_read_only(message: QueueMessage) -> None:
    message.id = "1-0"  # type: ignore[misc]


async def forgotten_await(queue: RedisStreamsQueue, consumer: QueueConsumer) -> None:
    queue.enqueue({})  # type: ignore[unused-coroutine]
    id: str = queue.enqueue({})  # type: ignore[assignment]
    with queue:  # type: ignore[attr-defined]
        pass
    for _ in consumer.iter_messages():  # type: ignore[attr-defined]
        print(id)
    await consumer.stop()  # type: ignore[func-returns-value, misc]


async def another_databases_handler(consumer: QueueConsumer) -> None:
    def handler(message: QueueMessage, tx: OtherTx) -> None: ...

    await consumer.run(handler=handler, db_factory=Database())  # type: ignore[arg-type]
    await consumer.run(handler=handler)  # type: ignore[call-arg]


def mixed_apis(queue: conquiet.sync.RedisStreamsQueue) -> None:
    QueueConsumer(queue)  # type: ignore[arg-type]


async def wrong_arguments_of_topics(broker: Broker, admin: Admin, message: Message, some: Any) -> None:
    # `some` is Any: mypy may also report that a value given without its name does not fit one of the options.
    await broker.send("orders")  # type: ignore[call-arg]
    await broker.send("orders", 1, "key")  # type: ignore[call-arg]
    await broker.send("orders", 1, key=5)  # type: ignore[arg-type]
    await broker.send("orders", 1, headers={"a": 1})  # type: ignore[dict-item]
    await broker.send_batch("orders", [1])  # type: ignore[list-item]
    await broker.create_topic("orders", partitions="8")  # type: ignore[arg-type]
    await admin.replay("orders", ids=[1])  # type: ignore[list-item]
    await admin.reset_group("orders", "billing", "nowhere")  # type: ignore[arg-type]
    await admin.delete_topic(broker.legacy("app:orders"))  # type: ignore[arg-type]
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


async def forgotten_await_of_topics(broker: Broker, messages: Messages, subscription: Subscription) -> None:
    broker.send("orders", 1)  # type: ignore[unused-coroutine]
    id: EntryId = broker.send("orders", 1)  # type: ignore[assignment]
    with broker.consume("orders", group="g"):  # type: ignore[attr-defined]
        print(id)
    for _ in messages:  # type: ignore[attr-defined]
        pass
    await subscription.stop()  # type: ignore[func-returns-value, misc]
