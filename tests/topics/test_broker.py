"""Topics as a broker makes, finds, grows and fills them; streams that were there before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import (
    Broker,
    ConfigError,
    Outgoing,
    QueueConfig,
    QueueError,
    RedisStreamsQueue,
    Retention,
    SubscribeOptions,
    TopicDefaults,
    UnknownTopicError,
)
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.conftest import Rung
from tests.rigs.asking import ask, keys_like
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.cluster_too

ORDERS = "orders"


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


async def payloads(url: str, keys: Keys, partition: int = 0) -> list[Any]:
    rows = await ask(url, "XRANGE", keys.partition(ORDERS, partition), "-", "+")
    return [json.loads(fields["payload"]) for _, fields in rows]


async def all_keys(url: str, namespace: str) -> list[str]:
    return await keys_like(url, f"{namespace}*")


# --- which topics there are ------------------------------------------------------------------------------------


async def test_creating_again_as_it_is_changes_nothing(broker: Broker, url: str, keys: Keys) -> None:
    kept = Retention(max_len=10, max_age=60, on_full="drop")
    for _ in range(2):
        await broker.create_topic(ORDERS, partitions=3, retention=kept, partitioner="consistent")
    meta = await ask(url, "HGETALL", keys.meta(ORDERS))
    await broker.create_topic(ORDERS, partitions=3, retention=kept, partitioner="consistent")
    assert await ask(url, "HGETALL", keys.meta(ORDERS)) == meta


@pytest.mark.any_server
@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"partitions": 4}, "exists with partitions=3, not 4"),
        ({"partitions": 2}, "exists with partitions=3, not 2"),
        ({"partitions": 3, "partitioner": "consistent"}, "exists with partitioner='murmur2', not 'consistent'"),
        ({"partitions": 3, "retention": Retention(max_len=5)}, "exists with retention=Retention"),
    ],
)
async def test_creating_again_otherwise_is_refused(
    broker: Broker, url: str, keys: Keys, asked: dict[str, Any], what: str
) -> None:
    await broker.create_topic(ORDERS, partitions=3)
    before = await ask(url, "HGETALL", keys.meta(ORDERS))
    with pytest.raises(ConfigError, match=what):
        await broker.create_topic(ORDERS, **asked)
    assert await ask(url, "HGETALL", keys.meta(ORDERS)) == before


@pytest.mark.any_server
async def test_many_who_create_at_once_make_one_topic(url: str, keys: Keys) -> None:
    brokers = [Broker(url, namespace=keys.namespace) for _ in range(5)]
    outcomes = await asyncio.gather(
        *(broker.create_topic(ORDERS, partitions=1 + n % 2) for n, broker in enumerate(brokers)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert len(refused) in (2, 3)
    assert all(isinstance(error, ConfigError) for error in refused)
    for broker in brokers:
        await broker.aclose()


@pytest.mark.any_server
async def test_an_unknown_topic_is_an_error_everywhere(broker: Broker, url: str, keys: Keys) -> None:
    with pytest.raises(UnknownTopicError, match=f"{keys.namespace}-x"):
        await broker.send(f"{keys.namespace}-x", 1)
    with pytest.raises(UnknownTopicError):
        await broker.send_batch(f"{keys.namespace}-x", [])
    with pytest.raises(UnknownTopicError):
        async with broker.consume(f"{keys.namespace}-x", group="g"):
            pass
    assert await all_keys(url, keys.namespace) == []


@pytest.mark.any_server
async def test_a_broker_may_create_what_it_does_not_know(url: str, keys: Keys) -> None:
    defaults = TopicDefaults(partitions=3, retention=Retention(max_len=7), partitioner="consistent")
    async with Broker(url, namespace=keys.namespace, auto_create=defaults) as broker:
        await broker.send(f"{keys.namespace}-a", 1)
        async with broker.consume(f"{keys.namespace}-b", group="g"):
            pass
        assert await broker.admin.list_topics() == [f"{keys.namespace}-a", f"{keys.namespace}-b"]
        about = await broker.admin.describe_topic(f"{keys.namespace}-a")
    assert (about.partitions, about.retention, about.partitioner) == (3, Retention(max_len=7), "consistent")


@pytest.mark.any_server
async def test_looking_creates_nothing_even_then(url: str, keys: Keys) -> None:
    async with Broker(url, namespace=keys.namespace, auto_create=TopicDefaults()) as broker:
        with pytest.raises(UnknownTopicError):
            await broker.admin.describe_topic(f"{keys.namespace}-a")
        assert await broker.admin.list_topics() == []


async def test_namespaces_do_not_see_each_other(url: str, keys: Keys) -> None:
    one, other = (Broker(url, namespace=f"{keys.namespace}-{n}") for n in (1, 2))
    await one.create_topic(ORDERS, partitions=2)
    await other.create_topic(ORDERS)
    await one.send_batch(ORDERS, [Outgoing(n) for n in range(10)])
    assert (await one.admin.describe_topic(ORDERS)).length == 10
    about = await other.admin.describe_topic(ORDERS)
    assert (about.partitions, about.length) == (1, 0)
    for name in await all_keys(url, keys.namespace):
        assert name.startswith((f"{keys.namespace}-1:", f"{keys.namespace}-2:"))
    await one.aclose()
    await other.aclose()


@pytest.mark.any_server
async def test_a_connected_broker_says_at_once_that_nobody_answers() -> None:
    with pytest.raises(QueueError):
        async with Broker.connect("redis://127.0.0.1:1"):
            pass


# --- legacy streams ---------------------------------------------------------------------------------------------


@pytest.fixture
async def queue(url: str, keys: Keys) -> AsyncIterator[RedisStreamsQueue]:
    """A queue whose stream has the name of a topic."""
    async with RedisStreamsQueue.connect(url, QueueConfig(f"{keys.namespace}:{ORDERS}", "g", "c")) as queue:
        yield queue


async def test_a_stream_under_the_bare_name_is_a_topic_of_one_partition(
    broker: Broker, queue: RedisStreamsQueue
) -> None:
    await queue.enqueue({"n": 1})
    id = await broker.send(ORDERS, {"n": 2})
    assert id.partition == 0
    assert [message.payload for message in await queue.read(count=2)] == [{"n": 1}, {"n": 2}]


async def test_creating_a_topic_over_a_stream_is_refused_unless_it_is_meant(
    broker: Broker, queue: RedisStreamsQueue, url: str, keys: Keys
) -> None:
    stream = queue.config.stream_key
    await queue.enqueue({"n": 1})
    with pytest.raises(ConfigError, match="adopt=True"):
        await broker.create_topic(ORDERS)
    assert await ask(url, "EXISTS", keys.meta(ORDERS)) == 0
    await broker.create_topic(ORDERS, adopt=True)
    await broker.send(ORDERS, 5)
    assert await ask(url, "XLEN", stream) == 1
    assert await payloads(url, keys) == [5]
    assert (await broker.admin.describe_topic(broker.legacy(stream))).length == 1


@pytest.mark.any_server
async def test_a_stream_outside_of_the_namespace_is_no_topic_in_it(broker: Broker, url: str, keys: Keys) -> None:
    stream = f"{keys.namespace}-q"
    await ask(url, "XADD", stream, "*", "data", "{}")
    with pytest.raises(UnknownTopicError):
        await broker.send(stream, {})
    await broker.create_topic(stream)
    async with Broker(url) as outside:
        await outside.send(stream, {})
    assert await ask(url, "XLEN", stream) == 2


@pytest.mark.any_server
async def test_any_key_can_be_named_as_a_legacy_stream(broker: Broker, url: str, keys: Keys) -> None:
    stream = f"{keys.namespace}:app:{{orders}}"
    await broker.send(broker.legacy(stream), {"n": 1})
    [(_, fields)] = await ask(url, "XRANGE", stream, "-", "+")
    assert fields == {"data": '{"n":1}'}
    with pytest.raises(ConfigError, match="delay needs a topic"):
        await broker.send(broker.legacy(stream), {}, delay=5)


# --- growth -----------------------------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_a_running_producer_goes_over_to_the_new_partitions(url: str, keys: Keys) -> None:
    clock = ManualClock()
    async with (
        Broker(url, namespace=keys.namespace, clock=clock) as admin,
        Broker(url, namespace=keys.namespace, clock=clock) as producer,
    ):
        await admin.create_topic(ORDERS, partitions=1)
        assert (await producer.send(ORDERS, 1, key="order:42")).partition == 0
        growing = asyncio.create_task(admin.admin.grow(ORDERS, partitions=3))
        await eventually(lambda: _planned(url, keys), "the growth is announced")
        assert (await producer.send(ORDERS, 2, key="order:42")).partition == 0
        clock.advance(5)
        assert (await growing).partitions == 3
        assert (await producer.send(ORDERS, 3, key="order:42")).partition == 2


async def _planned(url: str, keys: Keys) -> bool:
    return bool(await ask(url, "HEXISTS", keys.meta(ORDERS), "nextCount"))


# --- partitions -------------------------------------------------------------------------------------------------


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_partition_is_asked_for_again_when_the_answer_was_lost(url: str, keys: Keys) -> None:
    """Not only when the lease has run out that nobody knows to have."""
    options = SubscribeOptions(lease_ttl=3600, handle_signals=False)
    async with Proxy(url) as proxy, Broker(proxy.url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS)
        async with broker.consume(ORDERS, group="g"):
            pass  # the server knows the script
        cut = proxy.cut(Script.named("partition_acquire").sha.encode())
        async with broker.consume(ORDERS, group="g", options=options) as messages:
            await eventually(lambda: messages.owned[ORDERS] == (0,), "the partition is owned")
    assert cut.is_set()


# --- one round trip after the server forgot its scripts ---------------------------------------------------------


async def test_a_batch_keeps_its_order_when_the_server_forgot_the_script(rung: Rung) -> None:
    """Those of one partition keep their order, whatever way each of them is appended."""
    async with on_a_port(rung.binary) as server, Proxy(server.url) as proxy:
        async with Broker(proxy.url) as broker:
            await broker.create_topic(ORDERS)
            await broker.send(ORDERS, "warm-up", message_id="warm-up")
            await ask(server.url, "SCRIPT", "FLUSH")
            mixed = [Outgoing(n, message_id=f"m{n}" if n % 3 == 1 else None) for n in range(9)]
            ids = await broker.send_batch(ORDERS, mixed)
        assert await payloads(server.url, Keys()) == ["warm-up", *range(9)]
        assert ids == sorted(ids, key=lambda id: [int(part) for part in id.split("-")])
