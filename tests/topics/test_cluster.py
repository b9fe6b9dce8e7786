"""Topics on a Redis Cluster: everything that they can do elsewhere, also while slots move."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

import pytest
from redis.crc import key_slot

from conquiet import (
    Backoff,
    Broker,
    Message,
    Messages,
    Outgoing,
    Reject,
    Retention,
    RetryPolicy,
    SubscribeOptions,
    TopicFullError,
)
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask, lasting_keys
from tests.rigs.cluster import LocalCluster
from tests.rigs.waiting import eventually

pytestmark = pytest.mark.slow

ORDERS: Final = "orders"
PARTITIONS: Final = 6
AT_ONCE: Final = RetryPolicy(max_retries=2, backoff=Backoff(0, 0, "fixed"))
OPTIONS: Final = SubscribeOptions(retry=AT_ONCE, handle_signals=False)


class Seen:
    """A handler that notes what it gets, and fails where a test wants it to."""

    def __init__(self, *, failures: int = 0, reject: bool = False) -> None:
        self.by_payload: Counter[Any] = Counter()
        self.by_key: defaultdict[str | None, list[Any]] = defaultdict(list)
        self.partitions: set[int] = set()
        self.messages: list[Message] = []
        self.failures = failures
        self.reject = reject

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self.partitions.add(message.partition)
        if self.reject:
            raise Reject("not this one")
        if message.retry_count < self.failures:
            raise RuntimeError("not yet")
        self.by_payload[message.payload] += 1
        self.by_key[message.key].append(message.payload)

    def has(self, count: int) -> bool:
        return len(self.by_payload) >= count


@pytest.fixture
async def broker(cluster: LocalCluster, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(cluster.url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic(ORDERS, partitions=PARTITIONS)
        yield broker


async def test_the_nodes_share_what_may_be_in_flight(broker: Broker) -> None:
    await broker.send_batch(ORDERS, [Outgoing(n, partition=n % PARTITIONS) for n in range(120)])
    most = 0

    async def watch(messages: Messages) -> None:
        nonlocal most
        for _ in range(120):
            message = await messages.next(20)
            assert message is not None
            most = max(most, messages.inflight)
            await message.ack()

    options = replace(OPTIONS, max_inflight=5)
    async with broker.consume(ORDERS, group="g", options=options) as messages:
        await watch(messages)
    assert 0 < most <= 5


async def test_room_that_one_node_leaves_is_used_for_the_others(broker: Broker) -> None:
    """At once: nobody looks again by itself for longer than the test lasts."""
    await broker.send_batch(ORDERS, [Outgoing(n, partition=n % PARTITIONS) for n in range(60)])
    seen = Seen()
    options = replace(OPTIONS, max_inflight=1, poll_timeout=60.0)
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=options):
        await eventually(lambda: seen.has(60), "the messages of all nodes are handled")


async def test_the_partitions_are_on_all_nodes(broker: Broker, cluster: LocalCluster, keys: Keys) -> None:
    """What the other tests presume."""
    homes = {(await cluster.owner_of(keys.partition(ORDERS, index))).id for index in range(PARTITIONS)}
    assert len(homes) >= 2
    assert len({key_slot(keys.partition(ORDERS, index).encode()) for index in range(PARTITIONS)}) == PARTITIONS


async def test_what_is_sent_is_consumed_once_and_in_the_order_of_its_key(broker: Broker) -> None:
    messages = [Outgoing(n, key=f"k{n % 10}", message_id=f"m{n}") for n in range(100)]
    ids = await broker.send_batch(ORDERS, [*messages, *messages])
    assert ids[:100] == ids[100:]
    await asyncio.gather(*(broker.send(ORDERS, n, key=f"k{n % 10}") for n in range(100, 120)))
    seen = Seen()
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS):
        await eventually(lambda: seen.has(120), "all are handled")
    assert set(seen.by_payload.values()) == {1}
    assert all(found[:10] == sorted(found[:10]) for found in seen.by_key.values())
    group = await broker.admin.describe_group(ORDERS, "g")
    assert (group.lag, group.pending) == (0, 0)


async def test_pulling_works_too(broker: Broker) -> None:
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(30)])
    found = set()
    async with broker.consume(ORDERS, group="g", options=OPTIONS) as messages:
        async for message in messages:
            found.add(message.payload)
            await message.ack()
            if len(found) == 30:
                break
    assert (await broker.admin.describe_group(ORDERS, "g")).pending == 0


@pytest.mark.parametrize("mode", ["park", "requeue"])
async def test_what_fails_is_tried_again(broker: Broker, mode: Any) -> None:
    await broker.send_batch(ORDERS, [Outgoing(n) for n in range(20)])
    seen = Seen(failures=2)
    retry = RetryPolicy(max_retries=2, backoff=Backoff(0.001, 0.001, "fixed"), mode=mode)
    async with broker.subscribe(
        ORDERS, group="g", handler=seen, options=SubscribeOptions(retry=retry, handle_signals=False)
    ):
        await eventually(lambda: seen.has(20), "all succeed in the end")
    assert set(seen.by_payload.values()) == {1}
    assert len(seen.messages) == 60


async def test_dead_letters_cross_the_slots_and_come_back(broker: Broker) -> None:
    ids = await broker.send_batch(ORDERS, [Outgoing(n, partition=n) for n in range(PARTITIONS)])
    failing, seen = Seen(reject=True), Seen()
    async with broker.subscribe(ORDERS, group="g", handler=failing, options=OPTIONS):
        await eventually(lambda: _dead(broker, PARTITIONS), "all are dead letters")
    letters = await broker.admin.dead_letters(ORDERS)
    assert {(letter.partition, letter.original_id) for letter in letters} == {(id.partition, id) for id in ids}
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS):
        assert await broker.admin.replay(ORDERS) == PARTITIONS
        await eventually(lambda: seen.has(PARTITIONS), "the replayed ones are handled")
    assert await broker.admin.dead_letters(ORDERS) == []
    assert {message.id for message in seen.messages} == set(ids)


async def _dead(broker: Broker, count: int) -> bool:
    return len(await broker.admin.dead_letters(ORDERS)) == count


async def test_the_operators_view_adds_the_nodes_up(broker: Broker) -> None:
    await broker.send_batch(ORDERS, [Outgoing(n, partition=n % PARTITIONS) for n in range(60)])
    seen = Seen()
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS) as subscription:
        await eventually(lambda: seen.has(60), "all are handled")
        group = await broker.admin.describe_group(ORDERS, "g")
        assert {part.owner_id for part in group.partitions} == {subscription.consumer}
    admin = broker.admin
    about = await admin.describe_topic(ORDERS)
    assert (about.length, [part.length for part in about.by_partition]) == (60, [10] * PARTITIONS)
    assert await admin.list_topics() == [ORDERS]
    assert await admin.list_groups(ORDERS) == ["g"]
    assert (await admin.pending(ORDERS, "g")).entries == ()
    await admin.reset_group(ORDERS, "g", "earliest")
    assert (await admin.describe_group(ORDERS, "g")).lag == 60
    await admin.reset_group(ORDERS, "g", "latest")
    assert await admin.trim(ORDERS, max_len=4) == 60 - 4 * PARTITIONS
    await admin.delete_group(ORDERS, "g")
    assert await admin.list_groups(ORDERS) == []


async def test_a_deleted_topic_leaves_nothing_on_any_node(
    broker: Broker, cluster: LocalCluster, keys: Keys, clock: ManualClock
) -> None:
    await broker.send_batch(ORDERS, [Outgoing(n, message_id=str(n)) for n in range(20)])
    await broker.send(ORDERS, 1, delay=60)
    async with broker.subscribe(ORDERS, group="g", handler=Seen(reject=True), options=OPTIONS):
        await eventually(lambda: _dead(broker, 20), "all are dead letters")
    deleting = asyncio.create_task(broker.admin.delete_topic(ORDERS))
    await eventually(lambda: _advanced(clock, deleting), "the topic is deleted")
    await deleting
    for node in cluster.nodes:
        assert await lasting_keys(node.url, f"{keys.namespace}:*") == []


def _advanced(clock: ManualClock, task: asyncio.Task[Any], seconds: float = 1.0) -> bool:
    clock.advance(seconds)
    return task.done()


async def test_a_full_partition_rejects_on_its_node(broker: Broker, cluster: LocalCluster, keys: Keys) -> None:
    await broker.create_topic("small", partitions=2, retention=Retention(max_len=1, on_full="reject"))
    stream = keys.partition("small", 1)
    await ask((await cluster.owner_of(stream)).url, "XGROUP", "CREATE", stream, "slow", "0", "MKSTREAM")
    await broker.send("small", 1, partition=1)
    with pytest.raises(TopicFullError):
        await broker.send("small", 2, partition=1)
    await broker.send("small", 2, partition=0)


async def test_members_share_the_partitions_and_inherit_them(cluster: LocalCluster, keys: Keys) -> None:
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(Broker(cluster.url, namespace=keys.namespace)) for _ in range(3)]
        await brokers[0].create_topic(ORDERS, partitions=PARTITIONS)
        seen = Seen()
        members = [
            await stack.enter_async_context(broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS))
            for broker in brokers
        ]
        await eventually(
            lambda: [len(member.owned[ORDERS]) for member in members] == [2, 2, 2], "each has its share of two"
        )
        await members[0].aclose()
        await eventually(lambda: [len(member.owned[ORDERS]) for member in members[1:]] == [3, 3], "the others have all")
        await brokers[0].send_batch(ORDERS, [Outgoing(n, partition=n % PARTITIONS) for n in range(60)])
        await eventually(lambda: seen.has(60), "all are handled")
    assert set(seen.by_payload.values()) == {1}


async def test_a_running_subscription_takes_up_new_partitions(broker: Broker, clock: ManualClock) -> None:
    seen = Seen()
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS) as subscription:
        await broker.send_batch(ORDERS, [Outgoing(n, key=f"k{n}") for n in range(20)])
        growing = asyncio.create_task(broker.admin.grow(ORDERS, partitions=10))
        await eventually(lambda: _advanced(clock, growing, 0.1), "the topic has grown")
        await growing
        await eventually(lambda: len(subscription.owned[ORDERS]) == 10, "the new ones are owned")
        await broker.send_batch(ORDERS, [Outgoing(20 + n, partition=n) for n in range(10)])
        await eventually(lambda: seen.has(30), "all are handled")
    assert seen.partitions >= set(range(6, 10))


async def test_an_idle_consumer_costs_each_node_little(cluster: LocalCluster, keys: Keys) -> None:
    """Some thirty commands a second and node; what it is really is for a benchmark."""
    seen = Seen()
    async with Broker(cluster.url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS, partitions=12)
        async with broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS) as subscription:
            await eventually(lambda: len(subscription.owned[ORDERS]) == 12, "all partitions are owned")
            await broker.send_batch(ORDERS, [Outgoing(n) for n in range(24)])
            await eventually(lambda: seen.has(24), "all are handled")
            before, started = await _calls(cluster), asyncio.get_running_loop().time()
            await asyncio.sleep(2)  # what is measured: how much happens while nothing does
            seconds = asyncio.get_running_loop().time() - started
            after = await _calls(cluster)
    rates = [(later - earlier) / seconds for earlier, later in zip(before, after, strict=True)]
    assert min(rates) > 0
    assert max(rates) <= 60, rates


async def _calls(cluster: LocalCluster) -> list[int]:
    """How often clients asked each node for something; what scripts do there is not among it."""
    asked = [f"cmdstat_{command}" for command in ("evalsha", "eval", "xread", "get")]
    stats = [await ask(node.url, "INFO", "commandstats") for node in cluster.nodes]
    return [sum(stat[name]["calls"] for name in asked if name in stat) for stat in stats]


async def test_nothing_is_lost_while_a_slot_moves(broker: Broker, cluster: LocalCluster, keys: Keys) -> None:
    seen = Seen()
    sent = 0

    async def send(count: int) -> None:
        nonlocal sent
        for partition in range(PARTITIONS):
            for _ in range(count):
                await broker.send(ORDERS, sent, partition=partition)
                sent += 1

    async with broker.subscribe(ORDERS, group="g", handler=seen, options=OPTIONS) as subscription:
        await send(2)
        await eventually(lambda: seen.has(sent), "all are handled before")
        migration = await cluster.migration_of(keys.partition(ORDERS, 0))
        await migration.begin()
        await send(2)
        await migration.finish()
        await send(2)
        await eventually(lambda: seen.has(sent), "all are handled after")
        await eventually(lambda: _settled(broker), "all are acknowledged")
        assert len(subscription.owned[ORDERS]) == PARTITIONS
    assert set(seen.by_payload) == set(range(sent))
    assert await ask(migration.target.url, "EXISTS", keys.partition(ORDERS, 0)) == 1


async def _settled(broker: Broker) -> bool:
    group = await broker.admin.describe_group(ORDERS, "g")
    return (group.lag, group.pending) == (0, 0)


async def test_what_waits_for_its_retry_moves_along(
    broker: Broker, cluster: LocalCluster, keys: Keys, clock: ManualClock
) -> None:
    seen = Seen(failures=1)
    options = SubscribeOptions(retry=RetryPolicy(backoff=Backoff(60, 60, "fixed")), handle_signals=False)
    id = await broker.send(ORDERS, "tried again", partition=0)
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=options):
        await eventually(lambda: _parked(broker), "it waits for its retry")
        migration = await cluster.migration_of(keys.partition(ORDERS, 0))
        await migration.begin()
        await migration.finish()
        clock.advance(61)
        await eventually(lambda: seen.has(1), "it is tried again at its new place")
        await eventually(lambda: _settled(broker), "it is acknowledged")
    assert [(message.id, message.retry_count) for message in seen.messages] == [(id, 0), (id, 1)]


async def _parked(broker: Broker) -> bool:
    group = await broker.admin.describe_group(ORDERS, "g")
    return group.partitions[0].retry_depth == 1


async def test_a_legacy_stream_with_a_hash_tag_of_its_own(broker: Broker, keys: Keys) -> None:
    topic = broker.legacy(f"app:{{{keys.namespace}}}:orders")
    id = await broker.send(topic, {"n": 1})
    failing = Seen(reject=True)
    async with broker.subscribe(topic, group="g", handler=failing, options=OPTIONS):
        await eventually(lambda: len(failing.messages) == 1, "it is handled")
    assert failing.messages[0].id == id
    group = await broker.admin.describe_group(topic, "g")
    assert (group.lag, group.pending) == (0, 0)


async def test_each_node_learns_a_script_by_itself(broker: Broker, cluster: LocalCluster) -> None:
    for node in cluster.nodes:
        await ask(node.url, "SCRIPT", "FLUSH")
    messages = [Outgoing(n, message_id=f"m{n}", partition=n % PARTITIONS) for n in range(60)]
    ids = await broker.send_batch(ORDERS, messages)
    assert await broker.send_batch(ORDERS, messages) == ids
    assert (await broker.admin.describe_topic(ORDERS)).length == 60
