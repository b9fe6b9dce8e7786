"""What type checkers must see of the synchronous API of topics; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

from conquiet.sync import (
    Address,
    Admin,
    Backoff,
    Broker,
    BytesCodec,
    Codec,
    ConfigError,
    ConsistentHashPartitioner,
    DeadLetter,
    Delivery,
    EntryId,
    GroupInfo,
    GroupLostError,
    GroupPartition,
    Health,
    JsonCodec,
    LeaseError,
    LeaseLostError,
    LegacyTopic,
    MemberInfo,
    Message,
    Messages,
    Outgoing,
    Partitioner,
    PartitionInfo,
    PendingEntry,
    PendingPage,
    QueueError,
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

    def batch_handler(messages: list[Message]) -> list[BaseException | None]:
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
    assert_type(admin.read("orders", last=10), list[Message])
    assert_type(admin.read("orders", since=moment, partition=0, key="k", count=5), list[Message])
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


# --- what must be refused ---------------------------------------------------------------------------------------------


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
