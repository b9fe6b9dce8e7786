"""What many consumers, many topics and large messages cost: no more than grows with their number, and once each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from conquiet import Broker, Message, Outgoing, Subscription
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.asking import ask, blocked, comes_to_rest
from tests.rigs.proxy import Proxy
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, impatient, stays_below

pytestmark = pytest.mark.any_server

TTL: Final = 300.0
"""Seconds that are skipped: those which a slow machine needs do not count."""
RENEW: Final = Script.named("lease_renew")


class Scales(Proxy):
    """Knows how much the server has answered."""

    answered = 0

    async def _may_return(self, command: bytes, reply: bytes) -> bool:
        self.answered += len(reply)
        return True


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Scales]:
    async with Scales(url) as proxy:
        yield proxy


@pytest.fixture
async def broker(proxy: Scales, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(proxy.url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


def quiet(**changes: Any) -> Any:
    """Options of consumers that ask for nothing but what their group needs."""
    return impatient(lease_ttl=TTL, poll_timeout=60.0, **changes)


async def handle(message: Message) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a member joins", "leases are renewed"])
async def test_a_group_that_looks_at_itself_sends_no_command_for_each_member_and_partition(
    why: str, broker: Broker, proxy: Scales, clock: ManualClock, url: str
) -> None:
    members, partitions = 10, 48

    def sent() -> int:  # glances at the group apart, which go on all the time
        return sum(b"\r\nGET\r\n" not in command for command in proxy.received)

    await broker.create_topic("orders", partitions=partitions)
    async with AsyncExitStack() as stack:
        for number in range(members):  # each has a share that nobody can take from it
            options = quiet(partition_modulo=members, partition_remainder=number)
            await stack.enter_async_context(broker.subscribe("orders", group="g", handler=handle, options=options))

        async def is_shared() -> bool:
            return not (await broker.admin.describe_group("orders", "g")).unowned

        await eventually(is_shared, "all partitions are owned")
        await comes_to_rest(url, sent, "the looks that the last ones caused")
        proxy.received.clear()
        if why == "a member joins":
            options = quiet(partition_modulo=partitions + 1, partition_remainder=partitions)
            await stack.enter_async_context(broker.subscribe("orders", group="g", handler=handle, options=options))
        else:
            clock.advance(TTL * 0.34)

        await stays_below(3 * partitions + 12 * members, sent, "commands")


async def test_a_large_message_is_sent_once(broker: Broker, proxy: Scales, url: str) -> None:
    count, size = 4, 200_000
    await broker.create_topic("orders")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=quiet()):
        await blocked(url)
        before = proxy.answered
        for number in range(count):
            await blocked(url)
            await broker.send("orders", "x" * size)
            await seen.saw(number + 1)
        assert proxy.answered - before < 1.5 * count * size


async def test_a_wait_for_news_of_many_partitions_brings_each_large_message_once(
    broker: Broker, proxy: Scales, url: str
) -> None:
    partitions, size = 4, 1 << 20
    await broker.create_topic("orders", partitions=partitions)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=quiet()):
        await blocked(url)
        before = proxy.answered
        for number in range(3):
            await blocked(url)
            await broker.send_batch("orders", [Outgoing("x" * size, partition=index) for index in range(partitions)])
            await seen.saw((number + 1) * partitions)
        assert proxy.answered - before < 3 * partitions * size * 1.05


async def test_connections_do_not_grow_with_the_topics_of_a_subscription(
    broker: Broker, proxy: Scales, clock: ManualClock, url: str
) -> None:
    await ask(url, "SCRIPT", "LOAD", RENEW.text)
    topics = [f"topic-{number}" for number in range(10)]
    for topic in topics:
        await broker.create_topic(topic)
    async with broker.subscribe(topics, group="g", handler=handle, options=quiet()):
        clock.advance(TTL * 0.34)
        await eventually(lambda: proxy.count(RENEW.sha.encode()) >= len(topics), "every lease is renewed")
        assert proxy.open_connections <= 5


async def reads(url: str) -> int:
    """How often the server has read from its clients so far: what is written together is mostly read together."""
    return int((await ask(url, "INFO", "stats"))["total_reads_processed"])


@pytest.mark.slow
async def test_an_idle_consumer_of_many_topics_costs_no_more_than_one_of_few(
    broker: Broker, proxy: Scales, url: str
) -> None:
    topics = [f"topic-{number}" for number in range(200)]
    for topic in topics:
        await broker.create_topic(topic)
    async with broker.subscribe(topics, group="g", handler=handle, options=quiet()):
        await blocked(url)
        await eventually(lambda: proxy.count(Script.named("takeover").sha.encode()) >= len(topics), "all are looked at")
        proxy.received.clear()
        await stays_below(30, lambda: len(proxy.received), "commands")
        assert proxy.open_connections <= 3


async def test_all_leases_are_renewed_in_a_few_writes(url: str, keys: Keys, clock: ManualClock) -> None:
    topics = [f"topic-{number}" for number in range(10)]
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        for topic in topics:
            await broker.create_topic(topic, partitions=10)
        async with broker.subscribe(topics, group="g", handler=handle, options=quiet()) as consumer:
            leases = consumer._membership.leases
            await leases.beat()  # so that the server knows the scripts
            before = await reads(url)
            await leases.beat()
            assert len(leases) == 100
            assert await reads(url) - before <= 30


@pytest.mark.slow
async def test_consumers_that_start_together_cost_the_server_a_few_commands_each(
    broker: Broker, proxy: Scales, keys: Keys
) -> None:
    members, partitions = (64, 256) if IS_FULL else (16, 64)
    await broker.create_topic("orders", partitions=partitions)
    async with AsyncExitStack() as stack:

        async def start() -> Subscription:
            mine = await stack.enter_async_context(Broker(proxy.url, namespace=keys.namespace))
            subscription = mine.subscribe("orders", group="g", handler=handle, options=quiet())
            return await stack.enter_async_context(subscription)

        consumers = [await start()]
        proxy.received.clear()
        consumers += await asyncio.gather(*(start() for _ in range(members - 1)))

        def is_shared() -> bool:
            owned = [consumer.owned["orders"] for consumer in consumers]
            return sorted(sum(owned, ())) == list(range(partitions)) and max(map(len, owned)) == partitions // members

        await eventually(is_shared, "all partitions are shared")
        assert len(proxy.received) <= 60 * members + 12 * partitions
