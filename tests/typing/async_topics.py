"""What type checkers must see of the asynchronous API of topics; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

from conquiet import (
    Address,
    Admin,
    Backoff,
    Broker,
    BytesCodec,
    Codec,
    ConsistentHashPartitioner,
    DeadLetter,
    Delivery,
    EntryId,
    GroupInfo,
    Health,
    JsonCodec,
    LegacyTopic,
    Message,
    Messages,
    Outgoing,
    Partitioner,
    PendingPage,
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

    def batch_handler(messages: list[Message]) -> list[BaseException | None]:
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
    assert_type(await admin.read("orders", last=10), list[Message])
    assert_type(await admin.read("orders", since=moment, partition=0, key="k", count=5), list[Message])
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


# --- what must be refused ---------------------------------------------------------------------------------------------


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
